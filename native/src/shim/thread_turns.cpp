#include "shim/thread_turns.hpp"

#include <sys/syscall.h>
#include <unistd.h>

namespace kvo {

namespace {

// The kernel's struct sched_attr in its first version. Some C libraries define it in a header that others lack.
struct ThreadSchedule {
    std::uint32_t size = sizeof(ThreadSchedule);
    std::uint32_t policy = 0;
    std::uint64_t flags = 0;
    std::int32_t niceness = 0;
    std::uint32_t priority = 0;
    std::uint64_t turn_ns = 0;
    std::uint64_t deadline_ns = 0;
    std::uint64_t period_ns = 0;
};

static_assert(sizeof(ThreadSchedule) == 48);

constexpr std::uint32_t kOrdinary = 0;                  // SCHED_OTHER
constexpr std::uint64_t kChildrenAreOrdinary = 1 << 0;  // SCHED_FLAG_RESET_ON_FORK

}  // namespace

void take_short_turns() noexcept {
    ThreadSchedule schedule;
    if (syscall(SYS_sched_getattr, 0, &schedule, sizeof(schedule), 0) != 0 || schedule.policy != kOrdinary) {
        return;
    }
    schedule.flags |= kChildrenAreOrdinary;
    schedule.turn_ns = kShortTurnNs;
    static_cast<void>(syscall(SYS_sched_setattr, 0, &schedule, 0));
}

}  // namespace kvo
