// A process that can be asked whether it has exited, even if its number is used again. The server needs this before it
// gives memory to others: no process may still be copying from it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// Identifies a process for good; a number alone may be given to another process later.
struct ProcessIdentity {
    pid_t pid = 0;
    std::uint64_t start_ticks = 0;  // after boot, /proc/<pid>/stat field 22

    bool operator==(const ProcessIdentity&) const = default;
};

// The number in field 22 of a line of /proc/<pid>/stat. Pure. Names in field 2 may hold spaces and brackets.
std::optional<std::uint64_t> parse_start_ticks(std::string_view stat);

// Returns the identity of a process that is visible from here. A dead one that its parent has not waited for is still
// visible. Code::unavailable: there is no such process.
Result<ProcessIdentity> identify_process(pid_t pid, const std::filesystem::path& proc = "/proc");

// Movable. Nothing here blocks but wait_any_exit. Holding a handle does not keep the process from ending, nor its
// number from being used again.
class ProcessHandle {
public:
    // Opens exactly the process that was identified. Code::unavailable: it has ended and its number is free or
    // another's.
    static Result<ProcessHandle> open(const ProcessIdentity& identity);

    // A pidfd that another process sent; it is right about any process it was opened for. Takes the descriptor in any
    // case. Code::invalid: it is something else.
    static Result<ProcessHandle> adopt(FileDescriptor pidfd);

    // Whether the process's last thread has ended, even if its parent has not waited for it. A stopped process has not
    // exited. When in doubt (a poll that fails) the answer is false: memory is kept.
    bool has_exited() const noexcept;

    // Whether both are of one process. False where the kernel does not tell (before Linux 6.9).
    bool is_same(const ProcessHandle& other) const noexcept;

    // 0: unknown, as it was adopted from another PID namespace or had ended by then. For logs.
    pid_t pid() const noexcept { return pid_; }
    int file() const noexcept { return pidfd_.number(); }  // readable once the process has exited; for other polls

private:
    ProcessHandle(FileDescriptor pidfd, pid_t pid) noexcept : pidfd_(std::move(pidfd)), pid_(pid) {}

    FileDescriptor pidfd_;
    pid_t pid_;
};

// Blocks until at least one of the processes has exited, or for `timeout_ms` (negative: without bound, 0: not at all).
// The places of those that have, ascending; none after the timeout.
Result<std::vector<std::size_t>> wait_any_exit(std::span<const ProcessHandle* const> handles, int timeout_ms);

}  // namespace kvo
