#include "codec/record_seal.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "codec/record_codec.hpp"
#include "hash/sha256.hpp"

namespace kvo {
namespace {

constexpr std::string_view kNumberLabel = "kvoffload number of a key";
constexpr std::string_view kRecordLabel = "kvoffload key of a record";
constexpr std::size_t kPartBytes = std::size_t{64} << 10;  // opened, and then digested while a cache still has them
constexpr std::uint32_t kBoundMagic = 0x584f564b;          // "KVOX"
constexpr std::uint32_t kBoundVersion = 1;

// The associated data.
struct BoundFields {
    std::uint32_t magic = kBoundMagic;
    std::uint32_t version = kBoundVersion;
    std::uint64_t key = 0;
    std::uint64_t record_bytes = 0;
    std::uint32_t group = 0;
    std::uint32_t shard = 0;
    std::array<std::uint8_t, kFingerprintBytes> fingerprint{};
    std::array<std::uint8_t, kBlockHashBytes> block_hash{};
    std::array<std::uint8_t, kBlockHashBytes> parent{};
};
static_assert(sizeof(BoundFields) == 128);

struct InnerHead {
    std::uint64_t digest = 0;
    SealedForm form = SealedForm::plain;
};
static_assert(sizeof(InnerHead) == kSealedHeadBytes - kSaltBytes);

template <typename Block>
std::span<const std::uint8_t> bytes_of(const Block& block) {
    return {reinterpret_cast<const std::uint8_t*>(&block), sizeof block};
}

BoundFields bind_fields(std::uint64_t key, const SealedName& name) {
    BoundFields fields;
    fields.key = key;
    fields.record_bytes = name.record_bytes;
    fields.group = name.name.group;
    fields.shard = name.name.shard;
    std::ranges::copy(name.name.fingerprint, fields.fingerprint.begin());
    std::ranges::copy(name.name.block_hash, fields.block_hash.begin());
    std::ranges::copy(name.parent, fields.parent.begin());
    return fields;
}

// HMAC-SHA256 (RFC 2104) of a label and a salt, which are short.
Digest derive(const SealKey& key, std::string_view label, std::span<const std::uint8_t> salt) {
    constexpr std::size_t kMostBytes = 64;
    std::array<std::uint8_t, kSha256BlockBytes + kMostBytes> inner{};
    std::array<std::uint8_t, kSha256BlockBytes + kDigestBytes> outer{};
    for (std::size_t i = 0; i < kSha256BlockBytes; ++i) {
        const std::uint8_t byte = i < key.size() ? key[i] : std::uint8_t{0};
        inner[i] = byte ^ 0x36;
        outer[i] = byte ^ 0x5c;
    }
    auto end = std::ranges::copy(label, inner.begin() + kSha256BlockBytes).out;
    end = std::ranges::copy(salt, end).out;
    const Digest first = sha256(std::span<const std::uint8_t>(inner.begin(), end));
    std::ranges::copy(first, outer.begin() + kSha256BlockBytes);
    return sha256(outer);
}

std::uint64_t number_of(const SealKey& key) {
    const Digest derived = derive(key, kNumberLabel, {});
    std::uint64_t number = 0;
    std::memcpy(&number, derived.data(), sizeof number);
    return number;
}

bool fill_random(std::span<std::uint8_t> bytes) {
    return getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
}

}  // namespace

std::optional<SealedParts> split_sealed(std::span<const std::uint8_t> sealed) noexcept {
    if (sealed.size() < kSealOverheadBytes) {
        return std::nullopt;
    }
    return SealedParts{sealed.first<kSealedHeadBytes>(),
                       sealed.subspan(kSealedHeadBytes, sealed.size() - kSealOverheadBytes),
                       sealed.last<kSealTagBytes>()};
}

Result<SealKeys> SealKeys::make(std::span<const SealKey> keys) {
    if (keys.empty()) {
        return Status(Code::invalid, "records are sealed with at least one key");
    }
    const Result<const Libcrypto*> library = machine_libcrypto();
    if (!library.ok()) {
        return library.fault();
    }
    std::vector<Key> made;
    for (const SealKey& key : keys) {
        made.push_back({number_of(key), key});
    }
    return SealKeys(*library.value(), std::move(made));
}

const SealKeys::Key* SealKeys::find(std::uint64_t number) const noexcept {
    const auto found = std::ranges::find(keys_, number, &Key::number);
    return found == keys_.end() ? nullptr : &*found;
}

// The key is used for this one record, so that its nonce may be the same as all others'.
Status SealKeys::seal(const SealedName& name, std::uint64_t digest, SealedForm form,
                      std::span<const std::uint8_t> payload, std::span<std::uint8_t> sealed) const {
    const std::span salt = sealed.first(kSaltBytes);
    if (!fill_random(salt)) {
        return {Code::failed, "the kernel gives no random numbers"};
    }
    const Key& key = keys_.front();
    Result<Sealing> made = Sealing::make(*library_, derive(key.key, kRecordLabel, salt), Sealing::Way::seal);
    if (!made.ok()) {
        return made.fault();
    }
    Sealing& sealing = made.value();
    const BoundFields fields = bind_fields(key.number, name);
    const InnerHead head{digest, form};
    for (const Status& done :
         {sealing.begin(), sealing.bind(bytes_of(fields)), sealing.run(bytes_of(head), sealed.data() + kSaltBytes),
          sealing.run(payload, sealed.data() + kSealedHeadBytes)}) {
        if (!done.ok()) {
            return done;
        }
    }
    const Result<SealTag> tag = sealing.finish();
    if (!tag.ok()) {
        return tag.fault();
    }
    std::ranges::copy(tag.value(), sealed.last(kSealTagBytes).begin());
    return {};
}

std::optional<std::uint64_t> SealKeys::open(std::uint64_t number, const SealedName& name, const SealedParts& sealed,
                                            std::span<std::uint8_t> record, std::vector<std::uint8_t>& scratch) const {
    const Key* const key = find(number);
    if (key == nullptr || record.size() != name.record_bytes) {
        return std::nullopt;
    }
    Result<Sealing> made =
        Sealing::make(*library_, derive(key->key, kRecordLabel, sealed.head.first(kSaltBytes)), Sealing::Way::open);
    if (!made.ok()) {
        return std::nullopt;
    }
    Sealing& opening = made.value();
    const BoundFields fields = bind_fields(number, name);
    std::array<std::uint8_t, sizeof(InnerHead)> opened{};
    if (!opening.begin().ok() || !opening.bind(bytes_of(fields)).ok() ||
        !opening.run(sealed.head.subspan(kSaltBytes), opened.data()).ok()) {
        return std::nullopt;
    }
    InnerHead head;
    std::memcpy(&head, opened.data(), sizeof head);
    // Not checked yet: it only says where the bytes go, and either place has room for them.
    const bool is_coded = head.form == SealedForm::coded;
    if (is_coded) {
        scratch.resize(sealed.payload.size());
    } else if (sealed.payload.size() != record.size()) {
        return std::nullopt;
    }
    SealTag tag;
    std::ranges::copy(sealed.tag, tag.begin());
    RunDigest sum;
    const std::span target = is_coded ? std::span(scratch) : record;
    for (std::size_t at = 0; at < target.size(); at += kPartBytes) {
        const std::span part = target.subspan(at, std::min(kPartBytes, target.size() - at));
        if (!opening.run(sealed.payload.subspan(at, part.size()), part.data()).ok()) {
            return std::nullopt;
        }
        sum = is_coded ? sum : combine(sum, digest_run(part, at));
    }
    if (!opening.check(tag).ok() || (is_coded ? !decode_record(scratch, record) : head.form != SealedForm::plain)) {
        return std::nullopt;
    }
    const std::uint64_t digest =
        is_coded ? digest_record(record, name.name) : finish(sum, name.name, name.record_bytes);
    return digest == head.digest ? std::optional(digest) : std::nullopt;
}

}  // namespace kvo
