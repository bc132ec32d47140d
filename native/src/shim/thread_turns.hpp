// How long a thread runs before the kernel lets another one have its processor.
#pragma once

#include <cstdint>

namespace kvo {

inline constexpr std::uint64_t kShortTurnNs = 100'000;  // the kernel allows no shorter ones

// Asks for short turns of the calling thread. The kernel then runs it soon after it wakes, even if other threads
// compute all the time; in sum it gets no more of the processor than before. Threads that it starts have ordinary
// turns. Has no effect before Linux 6.12, or where the kernel does not allow it.
void take_short_turns() noexcept;

}  // namespace kvo
