// Waiting for another thread's few instructions, and giving up when they do not come.
#pragma once

#include <sched.h>

#include <cstdint>

namespace kvo {

class Spin {
public:
    // Pauses. Returns false once the wait has been long enough, tens of microseconds on an idle machine: the other
    // thread has lost its processor, was stopped, or has died.
    bool pause() noexcept {
        if (++turns_ < kBusyTurns) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
            return true;
        }
        sched_yield();
        return turns_ < kTurnLimit;
    }

private:
    static constexpr std::uint32_t kBusyTurns = 64;
    static constexpr std::uint32_t kTurnLimit = kBusyTurns + 32;
    std::uint32_t turns_ = 0;
};

}  // namespace kvo
