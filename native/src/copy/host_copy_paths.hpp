// The implementations of streamed lines. For host_copy*.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvo {

#if defined(__x86_64__)
void stream_lines_avx512(std::uint8_t* to, const std::uint8_t* from, std::size_t line_count) noexcept;
void stream_lines_avx2(std::uint8_t* to, const std::uint8_t* from, std::size_t line_count) noexcept;
#endif

}  // namespace kvo
