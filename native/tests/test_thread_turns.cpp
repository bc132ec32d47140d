#include "shim/thread_turns.hpp"

#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <thread>

#include "check.hpp"

using namespace kvo;

namespace {

bool has_turns() {
    utsname system{};
    int major = 0;
    int minor = 0;
    return uname(&system) == 0 && std::sscanf(system.release, "%d.%d", &major, &minor) == 2 &&
           (major > 6 || (major == 6 && minor >= 12));
}

std::uint64_t turn_ns() {
    std::array<std::uint64_t, 6> schedule{};  // the third is the nice value, the fourth how long a turn is
    CHECK_EQUAL(syscall(SYS_sched_getattr, 0, schedule.data(), sizeof(schedule), 0), 0);
    return schedule[3];
}

}  // namespace

TEST(one_thread_has_short_turns_and_those_that_it_starts_have_not) {
    std::uint64_t before = 0;
    std::uint64_t own = 0;
    std::uint64_t of_child = 0;
    std::thread([&] {
        before = turn_ns();
        take_short_turns();
        own = turn_ns();
        std::thread([&] { of_child = turn_ns(); }).join();
    }).join();
    CHECK_EQUAL(own, has_turns() ? kShortTurnNs : before);
    CHECK_EQUAL(of_child, before);
}
