#include "codec/record_seal.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"
#include "codec/record_codec.hpp"

using namespace kvo;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Bytes32 = std::array<std::uint8_t, 32>;

Bytes32 count_from(std::uint8_t first) {
    Bytes32 bytes;
    std::iota(bytes.begin(), bytes.end(), first);
    return bytes;
}

SealKeys make(const std::vector<SealKey>& keys = {count_from(96)}) {
    Result<SealKeys> made = SealKeys::make(keys);
    CHECK(made.ok());
    return std::move(made.value());
}

struct Named {
    Bytes32 fingerprint = count_from(0);
    Bytes32 block_hash = count_from(32);
    Bytes32 parent = count_from(64);
    std::uint32_t group = 3;
    std::uint32_t shard = 1;
    std::uint64_t record_bytes = 17;

    SealedName name() const { return {{fingerprint, block_hash, group, shard}, parent, record_bytes}; }
};

Bytes record_of(std::size_t length) {
    Bytes record(length);
    for (std::size_t i = 0; i < length; ++i) {
        record[i] = static_cast<std::uint8_t>(251 - i % 251);
    }
    return record;
}

Bytes seal(const SealKeys& keys, const Named& named, const Bytes& record) {
    Bytes sealed(record.size() + kSealOverheadBytes);
    const std::uint64_t digest = digest_record(record, named.name().name);
    CHECK(keys.seal(named.name(), digest, SealedForm::plain, record, sealed).ok());
    return sealed;
}

bool opens(const SealKeys& keys, const Named& named, const Bytes& sealed, const Bytes& wanted, std::uint64_t number) {
    const std::optional<SealedParts> parts = split_sealed(sealed);
    Bytes record(named.record_bytes), scratch;
    const auto digest = parts ? keys.open(number, named.name(), *parts, record, scratch) : std::nullopt;
    CHECK(!digest || (record == wanted && *digest == digest_record(record, named.name().name)));
    return digest.has_value();
}

bool opens(const SealKeys& keys, const Named& named, const Bytes& sealed, const Bytes& wanted) {
    return opens(keys, named, sealed, wanted, keys.sealing());
}

}  // namespace

// Made from docs/format.md with another implementation of HMAC and AES-GCM.
TEST(the_record_of_the_format_opens) {
    const Bytes sealed = {0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x8b, 0x8c,
                          0x8d, 0x8e, 0x8f, 0x84, 0xd2, 0x69, 0x91, 0x44, 0x7f, 0x5f, 0x3a, 0x4e, 0xc0,
                          0xbb, 0x00, 0x84, 0xb2, 0xa2, 0x44, 0xa4, 0xcc, 0x9c, 0xce, 0x89, 0xdb, 0xef,
                          0xeb, 0xab, 0xe6, 0xf2, 0x77, 0xd5, 0x94, 0x2d, 0x7a, 0x0f, 0xfc, 0xab, 0xa6,
                          0x90, 0x37, 0x25, 0x3b, 0x19, 0xcf, 0xe9, 0x9f, 0xb2, 0xbb, 0x45, 0xba, 0x5c};
    const SealKeys keys = make();
    CHECK_EQUAL(keys.sealing(), 0xdbf4e8159586c4e6U);
    CHECK(opens(keys, {}, sealed, record_of(17)));
}

TEST(records_of_any_length_come_back) {
    const SealKeys keys = make();
    for (const std::size_t length : {0, 1, 15, 16, 17, 4096, 1'000'003}) {
        Named named;
        named.record_bytes = length;
        const Bytes record = record_of(length), sealed = seal(keys, named, record);
        CHECK_EQUAL(sealed.size(), length + kSealOverheadBytes);
        CHECK(length < 15 || std::ranges::search(sealed, record).empty());
        CHECK(opens(keys, named, sealed, record));
    }
}

TEST(a_record_opens_where_its_sealed_bytes_lie) {
    const SealKeys keys = make();
    const Named named;
    Bytes sealed = seal(keys, named, record_of(17)), scratch;
    const std::span<std::uint8_t> record = std::span(sealed).subspan(kSealedHeadBytes, 17);
    CHECK(keys.open(keys.sealing(), named.name(), *split_sealed(sealed), record, scratch).has_value());
    CHECK(std::ranges::equal(record, record_of(17)));
}

TEST(a_coded_record_is_decoded_behind_its_seal) {
    const SealKeys keys = make();
    Named named;
    named.record_bytes = 65536;
    Bytes record(named.record_bytes);
    for (std::size_t i = 0; i < record.size(); ++i) {
        record[i] = static_cast<std::uint8_t>(i % 2 == 0 ? i * i >> 8 : 0x3f);
    }
    RecordEncoder encoder;
    const std::span<const std::uint8_t> coded = encoder.encode(record);
    CHECK(!coded.empty());
    Bytes sealed(coded.size() + kSealOverheadBytes);
    const std::uint64_t digest = digest_record(record, named.name().name);
    CHECK(keys.seal(named.name(), digest, SealedForm::coded, coded, sealed).ok());
    CHECK(opens(keys, named, sealed, record));
    // Its seal is right, but the bytes in it are no coded record.
    CHECK(keys.seal(named.name(), digest, SealedForm::coded, std::span(record).first(coded.size()), sealed).ok());
    CHECK(!opens(keys, named, sealed, record));
    CHECK(keys.seal(named.name(), digest, static_cast<SealedForm>(2), coded, sealed).ok());
    CHECK(!opens(keys, named, sealed, record));
}

TEST(the_same_record_is_sealed_otherwise_each_time) {
    const SealKeys keys = make();
    const Bytes first = seal(keys, {}, record_of(17)), second = seal(keys, {}, record_of(17));
    CHECK(!std::ranges::equal(std::span(first).first(kSaltBytes), std::span(second).first(kSaltBytes)));
    CHECK(!std::ranges::equal(std::span(first).subspan(kSaltBytes), std::span(second).subspan(kSaltBytes)));
}

TEST(no_bit_may_differ) {
    const SealKeys keys = make();
    Bytes sealed = seal(keys, {}, record_of(17));
    for (std::size_t bit = 0; bit < 8 * sealed.size(); ++bit) {
        sealed[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        CHECK(!opens(keys, {}, sealed, record_of(17)));
        sealed[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    }
    CHECK(opens(keys, {}, sealed, record_of(17)));
    for (std::size_t size = 0; size < sealed.size(); ++size) {
        CHECK(!opens(keys, {}, Bytes(sealed.begin(), sealed.begin() + static_cast<std::ptrdiff_t>(size)), {}));
    }
    sealed.push_back(0);
    CHECK(!opens(keys, {}, sealed, record_of(17)));
}

TEST(no_bit_of_the_name_may_differ) {
    const SealKeys keys = make();
    const Bytes sealed = seal(keys, {}, record_of(17));
    for (std::size_t bit = 0; bit < 256; ++bit) {
        const auto flip = [bit](Bytes32& bytes) { bytes[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8); };
        Named other;
        flip(other.fingerprint);
        CHECK(!opens(keys, other, sealed, record_of(17)));
        other = {};
        flip(other.block_hash);
        CHECK(!opens(keys, other, sealed, record_of(17)));
        other = {};
        flip(other.parent);
        CHECK(!opens(keys, other, sealed, record_of(17)));
        other = {};
        (bit < 32 ? other.group : other.shard) ^= 1U << bit % 32;
        CHECK(!opens(keys, other, sealed, record_of(17)));
    }
    Named longer;
    longer.record_bytes = 18;
    CHECK(!opens(keys, longer, sealed, record_of(18)));
}

TEST(a_digest_that_the_bytes_lack_does_not_open) {
    const SealKeys keys = make();
    const Named named;
    const Bytes record = record_of(17);
    Bytes sealed(record.size() + kSealOverheadBytes);
    CHECK(keys.seal(named.name(), 1, SealedForm::plain, record, sealed).ok());
    CHECK(!opens(keys, named, sealed, record));
}

TEST(the_first_key_seals_and_all_of_them_open) {
    const SealKey first = count_from(1), second = count_from(2);
    const SealKeys before = make({first}), during = make({second, first}), after = make({second});
    const Bytes old = seal(before, {}, record_of(17)), fresh = seal(during, {}, record_of(17));
    CHECK_EQUAL(during.sealing(), after.sealing());
    CHECK(during.sealing() != before.sealing());
    CHECK(opens(during, {}, old, record_of(17), before.sealing()));
    CHECK(opens(during, {}, fresh, record_of(17)));
    CHECK(opens(after, {}, fresh, record_of(17)));
    CHECK(!after.has(before.sealing()) && !opens(after, {}, old, record_of(17), before.sealing()));
    // Nor under the number of another key.
    CHECK(!opens(during, {}, old, record_of(17)));
}

TEST(no_key_is_refused) {
    const Result<SealKeys> made = SealKeys::make({});
    CHECK(!made.ok());
    CHECK(made.fault().code() == Code::invalid);
}
