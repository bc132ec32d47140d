#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "digest/digest.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

constexpr std::size_t kQuickBytes = 4 << 10;

using Bytes32 = std::span<const std::uint8_t, 32>;

Bytes32 view_32(const nb::bytes& bytes, const char* name) {
    if (bytes.size() != 32) {
        throw nb::value_error((std::string(name) + " must have 32 bytes, not " + std::to_string(bytes.size())).c_str());
    }
    return Bytes32(static_cast<const std::uint8_t*>(bytes.data()), 32);
}

std::uint32_t check_number(std::int64_t number, const char* name) {
    if (number < 0 || number > std::numeric_limits<std::uint32_t>::max()) {
        throw nb::value_error((std::string(name) + " must be 0 to 2**32 - 1, not " + std::to_string(number)).c_str());
    }
    return static_cast<std::uint32_t>(number);
}

RecordName make_name(const nb::bytes& fingerprint, const nb::bytes& block_hash, std::int64_t group,
                     std::int64_t shard) {
    return {view_32(fingerprint, "fingerprint"), view_32(block_hash, "block_hash"), check_number(group, "group"),
            check_number(shard, "shard")};
}

// A run's digest is a number below 2^64 + 13, so Python adds runs as it adds numbers.
nb::int_ to_python(const RunDigest& digest) {
    const nb::int_ low(digest.low);
    return digest.high == 0 ? low : nb::int_(low + (nb::int_(digest.high) << nb::int_(64)));
}

RunDigest from_python(const nb::int_& total) {
    const nb::object element = total % (nb::int_(digest_field::kPrimeAbove) + (nb::int_(1) << nb::int_(64)));
    const auto high = nb::cast<std::uint64_t>(element >> nb::int_(64));
    return {nb::cast<std::uint64_t>(element - (nb::int_(high) << nb::int_(64))), high};
}

std::uint64_t digest_record_of_buffer(nb::handle data, const nb::bytes& fingerprint, const nb::bytes& block_hash,
                                      std::int64_t group, std::int64_t shard) {
    const RecordName name = make_name(fingerprint, block_hash, group, shard);
    const BufferView buffer(data);
    const WithoutGil unlocked;
    return digest_record(buffer.bytes(), name);
}

nb::bytes digest_records_of_buffer(nb::handle data, std::uint64_t record_bytes, const nb::bytes& fingerprint,
                                   const nb::bytes& block_hashes, std::int64_t group, std::int64_t shard) {
    const BufferView buffer(data);
    const std::size_t record_count = block_hashes.size() / kBlockHashBytes;
    if (block_hashes.size() % kBlockHashBytes != 0) {
        throw nb::value_error("block_hashes must have 32 bytes for each record");
    }
    const bool fits = record_bytes == 0 || record_count <= buffer.bytes().size() / record_bytes;
    if (!fits || record_count * record_bytes != buffer.bytes().size()) {
        throw nb::value_error(("data has " + std::to_string(buffer.bytes().size()) + " bytes, not " +
                               std::to_string(record_bytes) + " for each of " + std::to_string(record_count) +
                               " block hashes")
                                  .c_str());
    }
    const Bytes32 fingerprint_view = view_32(fingerprint, "fingerprint");
    const std::span hashes(static_cast<const std::uint8_t*>(block_hashes.data()), block_hashes.size());
    const std::uint32_t group_number = check_number(group, "group"), shard_number = check_number(shard, "shard");
    std::vector<std::uint64_t> digests(record_count);
    {
        const WithoutGil unlocked;
        for (std::size_t i = 0; i < record_count; ++i) {
            const auto hash = hashes.subspan(i * kBlockHashBytes).first<kBlockHashBytes>();
            digests[i] = digest_record(buffer.bytes().subspan(i * record_bytes, record_bytes),
                                       {fingerprint_view, hash, group_number, shard_number});
        }
    }
    return nb::bytes(digests.data(), digests.size() * sizeof(std::uint64_t));
}

nb::bytes digest_records_in_slots(nb::handle slots, std::uint64_t record_bytes, const nb::bytes& fingerprint,
                                  const nb::bytes& block_hashes, std::int64_t group, std::int64_t shard) {
    const BufferView buffer(slots);
    const std::size_t count = block_hashes.size() / kBlockHashBytes;
    if (block_hashes.size() != count * kBlockHashBytes || buffer.bytes().size() != count * sizeof(std::uint64_t)) {
        throw nb::value_error("slots must have 8 bytes and block_hashes 32 for each record");
    }
    if (record_bytes > kMaxRecordBytes) {
        throw nb::value_error("a record must not be longer than 2**63 bytes");
    }
    const Bytes32 fingerprint_view = view_32(fingerprint, "fingerprint");
    const std::span hashes(static_cast<const std::uint8_t*>(block_hashes.data()), block_hashes.size());
    const std::uint32_t group_number = check_number(group, "group"), shard_number = check_number(shard, "shard");
    std::vector<std::uint64_t> digests(count);
    {
        const WithoutGil unlocked;
        for (std::size_t i = 0; i < count; ++i) {
            std::uint64_t address = 0;
            std::memcpy(&address, buffer.bytes().data() + i * sizeof address, sizeof address);
            digests[i] = digest_record({reinterpret_cast<const std::uint8_t*>(address), record_bytes},
                                       {fingerprint_view, hashes.subspan(i * kBlockHashBytes).first<kBlockHashBytes>(),
                                        group_number, shard_number});
        }
    }
    return nb::bytes(digests.data(), digests.size() * sizeof(std::uint64_t));
}

nb::int_ digest_run_of_buffer(nb::handle data, std::uint64_t offset) {
    const BufferView buffer(data);
    if (offset > kMaxRecordBytes || buffer.bytes().size() > kMaxRecordBytes - offset) {
        throw nb::value_error("a record must not be longer than 2**63 bytes");
    }
    RunDigest digest;
    {
        // Releasing the GIL and waiting to get it back takes longer than digesting a few bytes.
        std::optional<WithoutGil> unlocked;
        if (buffer.bytes().size() > kQuickBytes) {
            unlocked.emplace();
        }
        digest = digest_run(buffer.bytes(), offset);
    }
    return to_python(digest);
}

std::uint64_t finish_digest(const nb::int_& total, std::uint64_t record_bytes, const nb::bytes& fingerprint,
                            const nb::bytes& block_hash, std::int64_t group, std::int64_t shard) {
    if (record_bytes > kMaxRecordBytes) {
        throw nb::value_error("a record must not be longer than 2**63 bytes");
    }
    return finish(from_python(total), make_name(fingerprint, block_hash, group, shard), record_bytes);
}

nb::bytes finish_digests(nb::handle totals, std::uint64_t record_bytes, const nb::bytes& fingerprint,
                         const nb::bytes& block_hashes, std::int64_t group, std::int64_t shard) {
    const BufferView buffer(totals);
    const std::size_t record_count = block_hashes.size() / kBlockHashBytes;
    if (block_hashes.size() % kBlockHashBytes != 0 || buffer.bytes().size() != record_count * sizeof(RunDigest)) {
        throw nb::value_error("totals must have 16 bytes and block_hashes 32 for each record");
    }
    if (record_bytes > kMaxRecordBytes) {
        throw nb::value_error("a record must not be longer than 2**63 bytes");
    }
    const Bytes32 fingerprint_view = view_32(fingerprint, "fingerprint");
    const std::span hashes(static_cast<const std::uint8_t*>(block_hashes.data()), block_hashes.size());
    const std::uint32_t group_number = check_number(group, "group"), shard_number = check_number(shard, "shard");
    std::vector<std::uint64_t> digests(record_count);
    for (std::size_t i = 0; i < record_count; ++i) {
        RunDigest total;
        std::memcpy(&total, buffer.bytes().data() + i * sizeof total, sizeof total);
        if (total.high > 1 || (total.high == 1 && total.low >= digest_field::kPrimeAbove)) {
            throw nb::value_error(
                ("total " + std::to_string(i) + " is no sum of runs: it must be below 2**64 + 13").c_str());
        }
        const auto hash = hashes.subspan(i * kBlockHashBytes).first<kBlockHashBytes>();
        digests[i] = finish(total, {fingerprint_view, hash, group_number, shard_number}, record_bytes);
    }
    return nb::bytes(digests.data(), digests.size() * sizeof(std::uint64_t));
}

std::uint64_t read_buffer(nb::handle data) {
    const BufferView buffer(data);
    const WithoutGil unlocked;
    return read_bytes(buffer.bytes());
}

}  // namespace

void bind_digest(nb::module_& module) {
    module.def(
        "digest_record", digest_record_of_buffer, nb::arg("data"), nb::kw_only(), nb::arg("fingerprint"),
        nb::arg("block_hash"), nb::arg("group"), nb::arg("shard"),
        "The digest of one record (docs/format.md). The GIL is released: nobody may change the bytes meanwhile.");
    module.def("digest_records", digest_records_of_buffer, nb::arg("data"), nb::arg("record_bytes"), nb::kw_only(),
               nb::arg("fingerprint"), nb::arg("block_hashes"), nb::arg("group"), nb::arg("shard"),
               "The digests of records of one size that lie one after the other, 8 bytes each in the machine's order.");
    module.def("digest_slots", digest_records_in_slots, nb::arg("slots"), nb::arg("record_bytes"), nb::kw_only(),
               nb::arg("fingerprint"), nb::arg("block_hashes"), nb::arg("group"), nb::arg("shard"),
               "The same of records at these addresses, 8 bytes each.");
    module.def("digest_run", digest_run_of_buffer, nb::arg("data"), nb::arg("offset") = 0,
               "The part of a record's digest that is made by bytes which begin at `offset` of the record.");
    module.def("finish_digest", finish_digest, nb::arg("total"), nb::arg("record_bytes"), nb::kw_only(),
               nb::arg("fingerprint"), nb::arg("block_hash"), nb::arg("group"), nb::arg("shard"),
               "The digest of a record whose runs' digests have the sum `total`.");
    module.def("finish_digests", finish_digests, nb::arg("totals"), nb::arg("record_bytes"), nb::kw_only(),
               nb::arg("fingerprint"), nb::arg("block_hashes"), nb::arg("group"), nb::arg("shard"),
               "The same for many records: 16 bytes of a total each (low half, high half), 8 bytes of a digest each.");
    module.def("digest_path", [] { return digest_path().name; }, "The instructions that digests are made with.");
    module.def("read_bytes", read_buffer, nb::arg("data"),
               "Reads all bytes once, as fast as this machine can, and does nothing else: what digests are measured "
               "against. Returns the words combined by or.");
}

}  // namespace kvo
