#include "digest/digest_read_limit.hpp"

#include <algorithm>
#include <cstring>

#include "shim/cpu_features.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvo {
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
