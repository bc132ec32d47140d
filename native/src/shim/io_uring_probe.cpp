#include "shim/io_uring_probe.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <system_error>

namespace kvo {
namespace {

// The same on every architecture we build for. Named here because the headers of older systems do not know it.
constexpr long kIoUringSetup = 425;

// struct io_uring_params, 120 bytes, all zero: no flags. The kernel writes its answer into it; we need none of that.
using SetupParameters = std::array<std::uint64_t, 15>;

int read_disabled_level() {
    int level = -1;
    std::ifstream("/proc/sys/kernel/io_uring_disabled") >> level;
    return level;
}

}  // namespace

Status probe_io_uring() {
    SetupParameters parameters{};
    const long ring = syscall(kIoUringSetup, 1, parameters.data());
    if (ring < 0) {
        return io_uring_refusal(errno);
    }
    close(static_cast<int>(ring));
    return {};
}

Status io_uring_refusal(int error) {
    return {Code::unavailable, explain_io_uring_refusal(error, read_disabled_level())};
}

std::string explain_io_uring_refusal(int error, int disabled_level) {
    switch (error) {
        case ENOSYS:
            return "this kernel has no io_uring, or a sandbox (gVisor, seccomp) hides it";
        case EPERM:
            if (disabled_level > 0) {
                return "turned off by sysctl kernel.io_uring_disabled=" + std::to_string(disabled_level);
            }
            return "not permitted here; container runtimes' default seccomp profiles forbid it";
        case ENOMEM:
            return "not enough locked memory (ulimit -l)";
        case EMFILE:
        case ENFILE:
            return "no file descriptor left";
        default:
            return "io_uring_setup failed: " + std::generic_category().message(error);
    }
}

}  // namespace kvo
