// Short names of memory orders, for code that names one in nearly every line.
#pragma once

#include <atomic>

namespace kvo {

inline constexpr auto kRelaxed = std::memory_order_relaxed;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kRelease = std::memory_order_release;

}  // namespace kvo
