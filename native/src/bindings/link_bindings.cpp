#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "link/record_link.hpp"
#include "link/resp_values.hpp"
#include "link/sealing.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

constexpr std::size_t kMostHeadBytes = 1 << 12;

using Keys = std::optional<std::tuple<nb::bytes, nb::bytes>>;

// Raises an error if the other side, or the way to it, has failed.
void raise_if_lost(const Status& status) {
    if (!status.ok() && status.code() != Code::invalid) {
        PyErr_SetString(status.code() == Code::unavailable ? PyExc_TimeoutError : PyExc_ConnectionError,
                        status.message().c_str());
        throw nb::python_error();
    }
    raise_if_not_ok(status);
}

SealKey read_key(const nb::bytes& bytes) {
    if (bytes.size() != kSealKeyBytes) {
        throw nb::value_error("a key of a link has 32 bytes");
    }
    SealKey key;
    std::memcpy(key.data(), bytes.data(), key.size());
    return key;
}

RecordLink::Instant after(std::uint32_t timeout_ms) {
    return RecordLink::Clock::now() + std::chrono::milliseconds(timeout_ms);
}

LinkRecords read_records(const BufferView& slots, std::uint64_t record_bytes) {
    if (slots.bytes().size() % sizeof(std::uint64_t) != 0 || record_bytes > kMaxRecordBytes) {
        throw nb::value_error("slots are addresses of 8 bytes, and records have at most 2**63");
    }
    return {
        {reinterpret_cast<const std::uint64_t*>(slots.bytes().data()), slots.bytes().size() / sizeof(std::uint64_t)},
        record_bytes};
}

// Records of these names that are to come to slots. Needs the GIL to be made and to end.
class Wanted {
public:
    Wanted(nb::handle slots, std::uint64_t record_bytes, const nb::bytes& fingerprint, const nb::bytes& block_hashes,
           std::uint32_t group, std::uint32_t shard)
        : addresses_(slots),
          records_(read_records(addresses_, record_bytes)),
          fingerprint_(static_cast<const std::uint8_t*>(fingerprint.data())),
          hashes_(static_cast<const std::uint8_t*>(block_hashes.data())),
          group_(group),
          shard_(shard) {
        if (fingerprint.size() != kFingerprintBytes || block_hashes.size() != count() * kBlockHashBytes) {
            throw nb::value_error("a fingerprint has 32 bytes, and each record a hash of 32");
        }
    }

    std::size_t count() const { return records_.slots.size(); }
    const LinkRecords& records() const { return records_; }

    std::uint64_t finish_digest(std::size_t at, const RunDigest& total) const {
        const std::span<const std::uint8_t, kFingerprintBytes> identity(fingerprint_, kFingerprintBytes);
        const std::span<const std::uint8_t, kBlockHashBytes> hash(hashes_ + at * kBlockHashBytes, kBlockHashBytes);
        return finish(total, {identity, hash, group_, shard_}, records_.record_bytes);
    }

private:
    BufferView addresses_;
    LinkRecords records_;
    const std::uint8_t* fingerprint_;
    const std::uint8_t* hashes_;
    std::uint32_t group_, shard_;
};

class Link {
public:
    Link(int socket, const Keys& keys) : link_(open(socket, keys)) {}

    void send(nb::handle head, nb::handle slots, std::uint64_t record_bytes, std::uint32_t timeout_ms) {
        const BufferView bytes(head), addresses(slots);
        const LinkRecords records = read_records(addresses, record_bytes);
        Status status;
        {
            const WithoutGil unlocked;
            status = link_.send(bytes.bytes(), records, after(timeout_ms));
        }
        raise_if_lost(status);
    }

    nb::bytes receive(std::size_t size, std::uint32_t timeout_ms) {
        std::vector<std::uint8_t> bytes(size);
        Status status;
        {
            const WithoutGil unlocked;
            status = link_.receive(bytes, after(timeout_ms));
        }
        raise_if_lost(status);
        return nb::bytes(bytes.data(), bytes.size());
    }

    nb::bytes receive_records(nb::handle slots, std::uint64_t record_bytes, const nb::bytes& fingerprint,
                              const nb::bytes& block_hashes, std::uint32_t group, std::uint32_t shard,
                              std::uint32_t timeout_ms) {
        const Wanted wanted(slots, record_bytes, fingerprint, block_hashes, group, shard);
        std::vector<RunDigest> totals(wanted.count());
        std::vector<std::uint64_t> digests(wanted.count());
        Status status;
        {
            const WithoutGil unlocked;
            status = link_.receive_records(wanted.records(), totals, after(timeout_ms));
            for (std::size_t at = 0; at < wanted.count(); ++at) {
                digests[at] = wanted.finish_digest(at, totals[at]);
            }
        }
        raise_if_lost(status);
        return nb::bytes(digests.data(), digests.size() * sizeof(std::uint64_t));
    }

    std::tuple<nb::bytes, nb::bytes, std::uint64_t, std::uint64_t, double> receive_coded_records(
        nb::handle slots, std::uint64_t record_bytes, const nb::bytes& fingerprint, const nb::bytes& block_hashes,
        std::uint32_t group, std::uint32_t shard, std::uint32_t timeout_ms) {
        const Wanted wanted(slots, record_bytes, fingerprint, block_hashes, group, shard);
        std::vector<CameRecord> came(wanted.count());
        std::vector<std::uint64_t> digests(wanted.count());
        std::vector<std::uint8_t> whole(wanted.count());
        Result<CameCoded> told = CameCoded();
        {
            const WithoutGil unlocked;
            told = link_.receive_coded_records(wanted.records(), came, after(timeout_ms));
            for (std::size_t at = 0; at < wanted.count(); ++at) {
                whole[at] = came[at].is_whole;
                digests[at] = wanted.finish_digest(at, came[at].digest);
            }
        }
        raise_if_lost(told.ok() ? Status() : told.fault());
        const CameCoded& coded = told.value();
        return {nb::bytes(digests.data(), digests.size() * sizeof(std::uint64_t)),
                nb::bytes(whole.data(), whole.size()), coded.records, coded.coded_bytes,
                std::chrono::duration<double>(coded.decoding).count()};
    }

    void shut() noexcept { link_.shut(); }

private:
    static RecordLink open(int socket, const Keys& keys) {
        FileDescriptor owned(socket);
        std::optional<LinkKeys> read;
        if (keys) {
            read = LinkKeys{read_key(std::get<0>(*keys)), read_key(std::get<1>(*keys))};
        }
        Result<RecordLink> made = RecordLink::make(std::move(owned), read);
        if (!made.ok()) {
            raise_if_not_ok(made.fault());
        }
        return std::move(made.value());
    }

    RecordLink link_;
};

// Returns the heads and digests of the values that came, and the first and last position of the inbox's bytes that are
// not taken yet.
std::tuple<nb::bytes, nb::bytes, std::size_t, std::size_t> receive_resp_values(
    int socket, nb::handle inbox, std::size_t first, std::size_t last, nb::handle slots, std::uint64_t record_bytes,
    std::size_t head_bytes, const nb::bytes& fingerprint, const nb::bytes& block_hashes, std::uint32_t group,
    std::uint32_t shard, std::uint32_t timeout_ms) {
    const Wanted wanted(slots, record_bytes, fingerprint, block_hashes, group, shard);
    if (head_bytes > kMostHeadBytes) {
        throw nb::value_error("a value's head is too long");
    }
    const WritableBufferView room(inbox);
    RespInbox left{room.bytes(), first, last};
    std::vector<std::uint8_t> heads(wanted.count() * head_bytes);
    std::vector<RunDigest> totals(wanted.count());
    std::vector<std::uint64_t> digests;
    Result<std::size_t> came = std::size_t{0};
    {
        const WithoutGil unlocked;
        came = receive_values(socket, left, {head_bytes, wanted.records()}, heads, totals,
                              std::chrono::milliseconds(timeout_ms));
        for (std::size_t at = 0; came.ok() && at < came.value(); ++at) {
            digests.push_back(wanted.finish_digest(at, totals[at]));
        }
    }
    raise_if_lost(came.ok() ? Status() : came.fault());
    return {nb::bytes(heads.data(), came.value() * head_bytes),
            nb::bytes(digests.data(), digests.size() * sizeof(std::uint64_t)), left.first, left.last};
}

// Seconds in which so many bytes are sealed, in pieces as on a link: what a sealed link cannot be faster than.
double time_sealing(std::uint64_t size_bytes) {
    const Result<const Libcrypto*> library = machine_libcrypto();
    if (!library.ok()) {
        raise_if_not_ok(library.fault());
    }
    Result<Sealing> sealing = Sealing::make(*library.value(), SealKey{}, Sealing::Way::seal);
    if (!sealing.ok()) {
        raise_if_not_ok(sealing.fault());
    }
    std::vector<std::uint8_t> plain(RecordLink::kPieceBytes, 1), sealed(RecordLink::kPieceBytes);
    Status status;
    const auto begun = RecordLink::Clock::now();
    {
        const WithoutGil unlocked;
        for (std::uint64_t done = 0; done < size_bytes && status.ok(); done += plain.size()) {
            status = sealing.value().begin();
            if (status.ok()) {
                status = sealing.value().run(plain, sealed.data());
            }
            if (status.ok()) {
                const Result<SealTag> tag = sealing.value().finish();
                status = tag.ok() ? Status() : tag.fault();
            }
        }
    }
    raise_if_not_ok(status);
    return std::chrono::duration<double>(RecordLink::Clock::now() - begun).count();
}

// Its name, its version's number and its file.
std::tuple<std::string, unsigned long, std::string> describe_seal_library() {
    const Result<const Libcrypto*> library = machine_libcrypto();
    if (!library.ok()) {
        raise_if_not_ok(library.fault());
    }
    return {library.value()->name, library.value()->version, library.value()->file};
}

}  // namespace

void bind_link(nb::module_& module) {
    nb::class_<Link>(module, "RecordLink")
        .def(nb::init<int, const Keys&>(), nb::arg("socket"), nb::arg("keys") = nb::none())
        .def("send", &Link::send, nb::arg("head"), nb::arg("slots") = nb::bytes("", 0), nb::arg("record_bytes") = 0,
             nb::kw_only(), nb::arg("timeout_ms"))
        .def("receive", &Link::receive, nb::arg("size_bytes"), nb::kw_only(), nb::arg("timeout_ms"))
        .def("receive_records", &Link::receive_records, nb::arg("slots"), nb::arg("record_bytes"), nb::kw_only(),
             nb::arg("fingerprint"), nb::arg("block_hashes"), nb::arg("group"), nb::arg("shard"), nb::arg("timeout_ms"))
        .def("receive_coded_records", &Link::receive_coded_records, nb::arg("slots"), nb::arg("record_bytes"),
             nb::kw_only(), nb::arg("fingerprint"), nb::arg("block_hashes"), nb::arg("group"), nb::arg("shard"),
             nb::arg("timeout_ms"))
        .def("shut", &Link::shut);
    module.def("receive_resp_values", &receive_resp_values, nb::arg("socket"), nb::arg("inbox"), nb::arg("first"),
               nb::arg("last"), nb::arg("slots"), nb::arg("record_bytes"), nb::kw_only(), nb::arg("head_bytes"),
               nb::arg("fingerprint"), nb::arg("block_hashes"), nb::arg("group"), nb::arg("shard"),
               nb::arg("timeout_ms"));
    module.def("seal_library", &describe_seal_library);
    module.def("time_sealing", &time_sealing, nb::arg("size_bytes"));
}

}  // namespace kvo
