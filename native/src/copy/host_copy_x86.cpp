#if defined(__x86_64__)

// GCC's own AVX-512 intrinsics read a variable that they leave unset on purpose (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "copy/host_copy.hpp"

namespace kvo {

// The loads of four lines go out before the first store, so that the memory works on all of them.
__attribute__((target("avx512f"))) void stream_lines_avx512(std::uint8_t* to, const std::uint8_t* from,
                                                            std::size_t line_count) noexcept {
    for (; line_count >= 4; line_count -= 4, from += 4 * kStreamLineBytes, to += 4 * kStreamLineBytes) {
        const __m512i first = _mm512_loadu_si512(from);
        const __m512i second = _mm512_loadu_si512(from + kStreamLineBytes);
        const __m512i third = _mm512_loadu_si512(from + 2 * kStreamLineBytes);
        const __m512i fourth = _mm512_loadu_si512(from + 3 * kStreamLineBytes);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), first);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + kStreamLineBytes), second);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 2 * kStreamLineBytes), third);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 3 * kStreamLineBytes), fourth);
    }
    for (; line_count > 0; --line_count, from += kStreamLineBytes, to += kStreamLineBytes) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
    }
}

__attribute__((target("avx2"))) void stream_lines_avx2(std::uint8_t* to, const std::uint8_t* from,
                                                       std::size_t line_count) noexcept {
    constexpr std::size_t kHalf = kStreamLineBytes / 2;
    for (; line_count >= 2; line_count -= 2, from += 2 * kStreamLineBytes, to += 2 * kStreamLineBytes) {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kHalf));
        const __m256i third = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * kHalf));
        const __m256i fourth = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 3 * kHalf));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), first);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + kHalf), second);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 2 * kHalf), third);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 3 * kHalf), fourth);
    }
    if (line_count > 0) {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kHalf));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), first);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + kHalf), second);
    }
}

}  // namespace kvo

#endif
