#include "digest/digest.hpp"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// A word times its key has 124 bits, so sixteen of them fit 128. Two sums, because each addition waits for the last.
WordSum sum_blocks_portable(const std::uint8_t* source, std::uint8_t* copy, std::size_t first_word,
                            std::size_t block_count) noexcept {
    static_assert(kDigestBlockWords <= digest_field::kProductsBeforeCarry);
    WordSum sum = 0;
    const std::uint64_t* keys = kWordKeys.data() + first_word;
    for (; block_count > 0; --block_count, source += kDigestBlockBytes, keys += kDigestBlockWords) {
        std::uint64_t words[kDigestBlockWords];
        std::memcpy(words, source, sizeof words);
        if (copy != nullptr) {
            std::memcpy(copy, words, sizeof words);
            copy += kDigestBlockBytes;
        }
        digest_field::Unsigned even = 0, odd = 0;
        for (std::size_t i = 0; i < kDigestBlockWords; i += 2) {
            even += digest_field::Unsigned{words[i]} * keys[i];
            odd += digest_field::Unsigned{words[i + 1]} * keys[i + 1];
        }
        sum += digest_field::shorten(even + odd);
    }
    return sum;
}

namespace {

constexpr std::size_t kStrideBytes = 256;

std::uint64_t combine_words(std::span<const std::uint64_t> words) noexcept {
    std::uint64_t all = 0;
    for (const std::uint64_t word : words) {
        all |= word;
    }
    return all;
}

// Several registers, so that no load waits for another.
std::uint64_t read_portable(const std::uint8_t* bytes, std::size_t strides) noexcept {
    constexpr std::size_t kWords = 8;
    std::uint64_t seen[kWords] = {};
    for (std::size_t at = 0; at < strides * kStrideBytes; at += sizeof seen) {
        std::uint64_t words[kWords];
        std::memcpy(words, bytes + at, sizeof words);
        for (std::size_t i = 0; i < kWords; ++i) {
            seen[i] |= words[i];
        }
    }
    return combine_words(seen);
}

#if defined(__x86_64__)

__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::uint8_t* bytes, std::size_t strides) noexcept {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (; strides > 0; --strides, bytes += kStrideBytes) {
        a = _mm512_or_si512(a, _mm512_loadu_si512(bytes));
        b = _mm512_or_si512(b, _mm512_loadu_si512(bytes + 64));
        c = _mm512_or_si512(c, _mm512_loadu_si512(bytes + 128));
        d = _mm512_or_si512(d, _mm512_loadu_si512(bytes + 192));
    }
    alignas(64) std::uint64_t words[8];
    _mm512_store_si512(words, _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
    return combine_words(words);
}

__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::uint8_t* bytes, std::size_t strides) noexcept {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (; strides > 0; --strides, bytes += kStrideBytes) {
        const auto* const vectors = reinterpret_cast<const __m256i*>(bytes);
        a = _mm256_or_si256(a, _mm256_or_si256(_mm256_loadu_si256(vectors), _mm256_loadu_si256(vectors + 4)));
        b = _mm256_or_si256(b, _mm256_or_si256(_mm256_loadu_si256(vectors + 1), _mm256_loadu_si256(vectors + 5)));
        c = _mm256_or_si256(c, _mm256_or_si256(_mm256_loadu_si256(vectors + 2), _mm256_loadu_si256(vectors + 6)));
        d = _mm256_or_si256(d, _mm256_or_si256(_mm256_loadu_si256(vectors + 3), _mm256_loadu_si256(vectors + 7)));
    }
    alignas(32) std::uint64_t words[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words),
                       _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d)));
    return combine_words(words);
}

#endif

std::uint64_t read_strides(const std::uint8_t* bytes, std::size_t strides) noexcept {
#if defined(__x86_64__)
    if (cpu_features().has(CpuFeature::avx512f)) {
        return read_avx512(bytes, strides);
    }
    if (cpu_features().has(CpuFeature::avx2)) {
        return read_avx2(bytes, strides);
    }
#endif
    return read_portable(bytes, strides);
}

}  // namespace

std::uint64_t read_bytes(std::span<const std::uint8_t> bytes) noexcept {
    std::uint64_t all = read_strides(bytes.data(), bytes.size() / kStrideBytes);
    for (std::size_t at = bytes.size() / kStrideBytes * kStrideBytes; at < bytes.size(); at += sizeof all) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes.data() + at, std::min(sizeof word, bytes.size() - at));
        all |= word;
    }
    return all;
}

}  // namespace kvo
