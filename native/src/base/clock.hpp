#pragma once

#include <cstdint>
#include <ctime>

namespace kvo {

// The time of the clock that Python's time.monotonic_ns reads, too.
inline std::uint64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace kvo
