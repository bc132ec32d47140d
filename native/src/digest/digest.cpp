#include "digest/digest.hpp"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>

#include "digest/digest_paths.hpp"
#include "shim/cpu_features.hpp"

namespace kvo {
namespace {

constexpr DigestPath kPortable = {sum_blocks_portable, "portable"};

// The envelope's words, as docs/format.md lists them. They are hashed as if they stood behind the longest record.
constexpr std::size_t kBlockHashAt = kFingerprintBytes / kDigestWordBytes;
constexpr std::size_t kGroupAndShardAt = kBlockHashAt + kBlockHashBytes / kDigestWordBytes;
constexpr std::size_t kLengthAt = kGroupAndShardAt + 1;
constexpr std::size_t kVersionAt = kLengthAt + 1;
constexpr std::size_t kEnvelopeWords = kVersionAt + 1;
constexpr std::uint64_t kEnvelopeChunk = kMaxRecordBytes / kDigestChunkBytes;
static_assert(kEnvelopeWords <= digest_field::kProductsBeforeCarry);

// Less than a block's bytes of one chunk: zeros stand where the first and the last word have other bytes.
WordSum sum_odd_bytes(const std::uint8_t* source, std::size_t at, std::size_t length) noexcept {
    static_assert(kDigestBlockWords + 1 <= digest_field::kProductsBeforeCarry);
    digest_field::Unsigned sum = 0;
    while (length > 0) {
        const std::size_t skipped = at % kDigestWordBytes;
        const std::size_t count = std::min(kDigestWordBytes - skipped, length);
        std::uint64_t word = 0;
        if (count == sizeof word) {
            std::memcpy(&word, source, sizeof word);
        } else {
            std::memcpy(reinterpret_cast<std::uint8_t*>(&word) + skipped, source, count);
        }
        sum += digest_field::Unsigned{word} * kWordKeys[at / kDigestWordBytes];
        source += count;
        at += count;
        length -= count;
    }
    return digest_field::shorten(sum);
}

// Sums the part of a run that lies in one chunk: odd bytes, whole blocks, odd bytes. The part begins at `at` in the
// chunk.
WordSum sum_in_chunk(const std::uint8_t* source, std::uint8_t* copy, std::size_t at, std::size_t length,
                     const DigestPath& path) noexcept {
    const std::size_t head = std::min((kDigestBlockBytes - at % kDigestBlockBytes) % kDigestBlockBytes, length);
    const std::size_t blocks = (length - head) / kDigestBlockBytes;
    const std::size_t tail_at = head + blocks * kDigestBlockBytes;
    WordSum sum = sum_odd_bytes(source, at, head) + sum_odd_bytes(source + tail_at, at + tail_at, length - tail_at);
    if (blocks > 0) {
        sum += path.sum_blocks(source + head, copy == nullptr ? nullptr : copy + head, (at + head) / kDigestWordBytes,
                               blocks);
    }
    if (copy != nullptr) {
        std::copy_n(source, head, copy);
        std::copy_n(source + tail_at, length - tail_at, copy + tail_at);
    }
    return sum;
}

RunDigest sum_run(std::uint8_t* copy, std::span<const std::uint8_t> bytes, std::uint64_t offset,
                  const DigestPath& path) noexcept {
    WordSum total = 0;  // reduced at the end: no memory holds chunks enough to fill it
    while (!bytes.empty()) {
        const auto at = static_cast<std::size_t>(offset % kDigestChunkBytes);
        const std::size_t length = std::min<std::size_t>(kDigestChunkBytes - at, bytes.size());
        const WordSum part = sum_in_chunk(bytes.data(), copy, at, length, path);
        total += digest_field::multiply(part, chunk_multiplier(offset / kDigestChunkBytes));
        bytes = bytes.subspan(length);
        offset += length;
        copy = copy == nullptr ? nullptr : copy + length;
    }
    return digest_field::reduce(total);
}

[[maybe_unused]] bool is_in_record(std::size_t length, std::uint64_t offset) noexcept {
    return offset <= kMaxRecordBytes && length <= kMaxRecordBytes - offset;
}

}  // namespace

std::span<const DigestPath> digest_paths() noexcept {
#if defined(__x86_64__)
    static constexpr std::array kPaths = {DigestPath{sum_blocks_avx512, "avx512"}, DigestPath{sum_blocks_avx2, "avx2"},
                                          kPortable};
    const std::size_t missing = cpu_features().has(CpuFeature::avx512f) ? 0
                                : cpu_features().has(CpuFeature::avx2)  ? 1
                                                                        : 2;
#else
    static constexpr std::array kPaths = {kPortable};
    const std::size_t missing = 0;
#endif
    return std::span(kPaths).subspan(missing);
}

RunDigest digest_run(std::span<const std::uint8_t> bytes, std::uint64_t offset, const DigestPath& path) noexcept {
    assert(is_in_record(bytes.size(), offset));
    return sum_run(nullptr, bytes, offset, path);
}

RunDigest copy_with_digest(std::uint8_t* copy, std::span<const std::uint8_t> bytes, std::uint64_t offset,
                           const DigestPath& path) noexcept {
    assert(is_in_record(bytes.size(), offset));
    return sum_run(copy, bytes, offset, path);
}

std::uint64_t finish(const RunDigest& total, const RecordName& name, std::uint64_t record_bytes) noexcept {
    assert(record_bytes <= kMaxRecordBytes);
    std::array<std::uint64_t, kEnvelopeWords> envelope;
    std::memcpy(envelope.data(), name.fingerprint.data(), kFingerprintBytes);
    std::memcpy(envelope.data() + kBlockHashAt, name.block_hash.data(), kBlockHashBytes);
    envelope[kGroupAndShardAt] = name.group | std::uint64_t{name.shard} << 32;
    envelope[kLengthAt] = record_bytes;
    envelope[kVersionAt] = kDigestVersion;
    digest_field::Unsigned sum = 0;
    for (std::size_t word = 0; word < envelope.size(); ++word) {
        sum += digest_field::Unsigned{envelope[word]} * kWordKeys[word];
    }
    const WordSum part = digest_field::multiply(digest_field::shorten(sum), chunk_multiplier(kEnvelopeChunk));
    const std::uint64_t digest = digest_field::mix(combine(total, digest_field::reduce(part)).low);
    return digest == kNoDigest ? 1 : digest;
}

std::uint64_t digest_record(std::span<const std::uint8_t> record, const RecordName& name,
                            const DigestPath& path) noexcept {
    return finish(digest_run(record, 0, path), name, record.size());
}

}  // namespace kvo
