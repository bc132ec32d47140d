#if defined(__x86_64__)

#include <immintrin.h>

#include "hash/sha256_paths.hpp"

namespace kvo {

// One instruction does two rounds. It wants the state as (a b e f) and (c d g h), high word first; after two rounds
// the old (a b e f) is the new (c d g h), so the two registers take turns.
__attribute__((target("sha,sse4.1"))) void sha256_compress_sha_ni(Sha256State& state, const std::uint8_t* blocks,
                                                                  std::size_t block_count) noexcept {
    const __m128i swap_bytes = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    auto* words = reinterpret_cast<__m128i*>(state.data());
    const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
    const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
    __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xf0);

    for (; block_count > 0; --block_count, blocks += kSha256BlockBytes) {
        const __m128i abef_before = abef;
        const __m128i cdgh_before = cdgh;
        __m128i schedule[4];  // a ring of the last sixteen message words
#pragma GCC unroll 16
        for (std::size_t i = 0; i < 16; ++i) {
            __m128i& current = schedule[i % 4];
            if (i < 4) {
                const auto* source = reinterpret_cast<const __m128i*>(blocks + 16 * i);
                current = _mm_shuffle_epi8(_mm_loadu_si128(source), swap_bytes);
            } else {
                const __m128i& last = schedule[(i + 3) % 4];
                const __m128i seven_back = _mm_alignr_epi8(last, schedule[(i + 2) % 4], 4);
                const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(current, schedule[(i + 1) % 4]), seven_back);
                current = _mm_sha256msg2_epu32(sum, last);
            }
            const auto* constants = reinterpret_cast<const __m128i*>(kSha256Rounds.data() + 4 * i);
            const __m128i keyed = _mm_add_epi32(current, _mm_load_si128(constants));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }

    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace kvo

#endif
