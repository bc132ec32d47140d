#if defined(__x86_64__)

// GCC's own AVX-512 intrinsics read a variable that they leave unset on purpose (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>

#include "digest/digest_paths.hpp"

namespace kvo {
namespace {

constexpr std::size_t kCarryBlocks = digest_field::kProductsBeforeCarry;

// Asks for what comes a little later, which the processor would not do across a page's end, and for which the sums
// leave too little room among the instructions that it looks at. May point behind the run: that is no fault.
void prefetch(const std::uint8_t* source) noexcept {
    constexpr std::uintptr_t kAheadBytes = 512;
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(source) + kAheadBytes));
}

// Each lane has the four sums of PartialSums in digest_lane.hpp, carried as there.
template <bool kCopies>
__attribute__((target("avx512f"))) WordSum sum_avx512(const std::uint8_t* source, std::uint8_t* copy,
                                                      const std::uint64_t* keys, std::size_t block_count) noexcept {
    const __m512i low_half = _mm512_set1_epi64(0xffffffff);
    __m512i low_low = _mm512_setzero_si512(), low_high = low_low, high_low = low_low, high_high = low_low;
    __m512i top = low_low;
    while (block_count > 0) {
        const std::size_t blocks = std::min(block_count, kCarryBlocks);
        block_count -= blocks;
#pragma GCC unroll 4
        for (std::size_t i = 0; i < blocks; ++i) {
            prefetch(source);
            const __m512i word = _mm512_loadu_si512(source);
            const __m512i key = _mm512_load_si512(keys);
            if constexpr (kCopies) {
                _mm512_storeu_si512(copy, word);
                copy += kDigestBlockBytes;
            }
            const __m512i word_high = _mm512_srli_epi64(word, 32);
            const __m512i key_high = _mm512_srli_epi64(key, 32);
            low_low = _mm512_add_epi64(low_low, _mm512_mul_epu32(word, key));
            low_high = _mm512_add_epi64(low_high, _mm512_mul_epu32(word, key_high));
            high_low = _mm512_add_epi64(high_low, _mm512_mul_epu32(word_high, key));
            high_high = _mm512_add_epi64(high_high, _mm512_mul_epu32(word_high, key_high));
            source += kDigestBlockBytes;
            keys += kDigestBlockWords;
        }
        low_high = _mm512_add_epi64(low_high, _mm512_srli_epi64(low_low, 32));
        high_high = _mm512_add_epi64(
            high_high, _mm512_add_epi64(_mm512_srli_epi64(low_high, 32), _mm512_srli_epi64(high_low, 32)));
        top = _mm512_add_epi64(top, _mm512_srli_epi64(high_high, 32));
        low_low = _mm512_and_si512(low_low, low_half);
        low_high = _mm512_and_si512(low_high, low_half);
        high_low = _mm512_and_si512(high_low, low_half);
        high_high = _mm512_and_si512(high_high, low_half);
    }
    // Each lane now has at most 35 bits, so the sum of the lanes fits one. Adds pairs of lanes, then pairs of pairs.
    const __m512i middle = _mm512_add_epi64(low_high, high_low);
    const __m512i lows =
        _mm512_add_epi64(_mm512_unpacklo_epi64(low_low, middle), _mm512_unpackhi_epi64(low_low, middle));
    const __m512i highs =
        _mm512_add_epi64(_mm512_unpacklo_epi64(high_high, top), _mm512_unpackhi_epi64(high_high, top));
    const __m512i both =
        _mm512_add_epi64(_mm512_shuffle_i64x2(lows, highs, 0x88), _mm512_shuffle_i64x2(lows, highs, 0xdd));
    // Now (ones halves) twice, then (wholes tops) twice.
    alignas(64) std::uint64_t sums[8];
    _mm512_store_si512(sums, both);
    return digest_field::weigh(sums[0] + sums[2], sums[1] + sums[3], sums[4] + sums[6], sums[5] + sums[7]);
}

template <bool kCopies>
__attribute__((target("avx2"))) WordSum sum_avx2(const std::uint8_t* source, std::uint8_t* copy,
                                                 const std::uint64_t* keys, std::size_t block_count) noexcept {
    constexpr std::size_t kHalfBytes = kDigestBlockBytes / 2;
    const __m256i low_half = _mm256_set1_epi64x(0xffffffff);
    __m256i low_low = _mm256_setzero_si256(), low_high = low_low, high_low = low_low, high_high = low_low;
    __m256i top = low_low;
    std::size_t half_count = 2 * block_count;
    while (half_count > 0) {
        const std::size_t halves = std::min(half_count, kCarryBlocks);
        half_count -= halves;
#pragma GCC unroll 4
        for (std::size_t i = 0; i < halves; ++i) {
            if (i % 2 == 0) {
                prefetch(source);
            }
            const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
            const __m256i key = _mm256_load_si256(reinterpret_cast<const __m256i*>(keys));
            if constexpr (kCopies) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(copy), word);
                copy += kHalfBytes;
            }
            const __m256i word_high = _mm256_srli_epi64(word, 32);
            const __m256i key_high = _mm256_srli_epi64(key, 32);
            low_low = _mm256_add_epi64(low_low, _mm256_mul_epu32(word, key));
            low_high = _mm256_add_epi64(low_high, _mm256_mul_epu32(word, key_high));
            high_low = _mm256_add_epi64(high_low, _mm256_mul_epu32(word_high, key));
            high_high = _mm256_add_epi64(high_high, _mm256_mul_epu32(word_high, key_high));
            source += kHalfBytes;
            keys += kDigestBlockWords / 2;
        }
        low_high = _mm256_add_epi64(low_high, _mm256_srli_epi64(low_low, 32));
        high_high = _mm256_add_epi64(
            high_high, _mm256_add_epi64(_mm256_srli_epi64(low_high, 32), _mm256_srli_epi64(high_low, 32)));
        top = _mm256_add_epi64(top, _mm256_srli_epi64(high_high, 32));
        low_low = _mm256_and_si256(low_low, low_half);
        low_high = _mm256_and_si256(low_high, low_half);
        high_low = _mm256_and_si256(high_low, low_half);
        high_high = _mm256_and_si256(high_high, low_half);
    }
    const __m256i middle = _mm256_add_epi64(low_high, high_low);
    const __m256i lows =
        _mm256_add_epi64(_mm256_unpacklo_epi64(low_low, middle), _mm256_unpackhi_epi64(low_low, middle));
    const __m256i highs =
        _mm256_add_epi64(_mm256_unpacklo_epi64(high_high, top), _mm256_unpackhi_epi64(high_high, top));
    alignas(32) std::uint64_t sums[4];
    _mm256_store_si256(
        reinterpret_cast<__m256i*>(sums),
        _mm256_add_epi64(_mm256_permute2x128_si256(lows, highs, 0x20), _mm256_permute2x128_si256(lows, highs, 0x31)));
    return digest_field::weigh(sums[0], sums[1], sums[2], sums[3]);
}

}  // namespace

WordSum sum_blocks_avx512(const std::uint8_t* source, std::uint8_t* copy, std::size_t first_word,
                          std::size_t block_count) noexcept {
    const std::uint64_t* const keys = kWordKeys.data() + first_word;
    return copy == nullptr ? sum_avx512<false>(source, copy, keys, block_count)
                           : sum_avx512<true>(source, copy, keys, block_count);
}

WordSum sum_blocks_avx2(const std::uint8_t* source, std::uint8_t* copy, std::size_t first_word,
                        std::size_t block_count) noexcept {
    const std::uint64_t* const keys = kWordKeys.data() + first_word;
    return copy == nullptr ? sum_avx2<false>(source, copy, keys, block_count)
                           : sum_avx2<true>(source, copy, keys, block_count);
}

}  // namespace kvo

#endif
