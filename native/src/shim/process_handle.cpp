#include "shim/process_handle.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "base/status.hpp"

namespace kvo {
namespace {

// The same on every architecture we build for. Named here because the headers of older systems do not know it.
constexpr long kPidfdOpen = 434;
constexpr auto kPidfsMagic = static_cast<decltype(std::declval<struct statfs>().f_type)>(0x50494446);

constexpr short kExited = POLLIN | POLLHUP;

Status gone(pid_t pid) { return {Code::unavailable, "process " + std::to_string(pid) + " has ended"}; }

// All pidfds of a process have one inode where they have a file system of their own; before, those of all processes
// had.
std::uint64_t unique_number(int pidfd) noexcept {
    struct statfs system{};
    struct stat facts{};
    const bool is_told = fstatfs(pidfd, &system) == 0 && system.f_type == kPidfsMagic && fstat(pidfd, &facts) == 0;
    return is_told ? facts.st_ino : 0;
}

// Reads the process's number from the kernel's facts about a pidfd: 0 if the process is not visible from here. Returns
// nothing for other files.
std::optional<pid_t> read_pid_of(int file) {
    std::ifstream stream("/proc/self/fdinfo/" + std::to_string(file));
    std::string line;
    while (std::getline(stream, line)) {
        pid_t pid = 0;
        if (line.starts_with("Pid:")) {
            const std::size_t digit = std::min(line.find_first_of("-0123456789"), line.size());
            std::from_chars(line.data() + digit, line.data() + line.size(), pid);
            return std::max(pid, 0);
        }
    }
    return std::nullopt;
}

}  // namespace

std::optional<std::uint64_t> parse_start_ticks(std::string_view stat) {
    const std::size_t name_end = stat.rfind(')');
    if (name_end == std::string_view::npos) {
        return std::nullopt;
    }
    stat.remove_prefix(name_end + 1);
    constexpr int kFieldsBetween = 20;  // 3 to 21 and the blank before
    for (int field = 0; field < kFieldsBetween; ++field) {
        const std::size_t blank = stat.find(' ');
        if (blank == std::string_view::npos) {
            return std::nullopt;
        }
        stat.remove_prefix(blank + 1);
    }
    std::uint64_t ticks = 0;
    const auto [end, fault] = std::from_chars(stat.data(), stat.data() + stat.size(), ticks);
    const bool is_whole = end == stat.data() + stat.size() || *end == ' ' || *end == '\n';
    return fault == std::errc{} && is_whole ? std::optional(ticks) : std::nullopt;
}

Result<ProcessIdentity> identify_process(pid_t pid, const std::filesystem::path& proc) {
    const std::filesystem::path path = proc / std::to_string(pid) / "stat";
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::array<char, 4096> text;
    const ssize_t length = file.is_open() ? read(file.number(), text.data(), text.size()) : -1;
    if (length < 0) {
        // Any other error, such as too few descriptors or a /proc that hides other users' processes, does not show that
        // the process is gone.
        return errno == ENOENT || errno == ESRCH ? gone(pid) : system_fault("reading " + path.string(), errno);
    }
    const std::string_view stat(text.data(), static_cast<std::size_t>(length));
    const std::optional<std::uint64_t> ticks = parse_start_ticks(stat);
    if (!ticks) {
        return Status(Code::failed, path.string() + " has no field 22: " + std::string(stat));
    }
    return ProcessIdentity{pid, *ticks};
}

Result<ProcessHandle> ProcessHandle::open(const ProcessIdentity& identity) {
    FileDescriptor pidfd(static_cast<int>(syscall(kPidfdOpen, identity.pid, 0)));
    if (!pidfd.is_open()) {
        return errno == ESRCH ? gone(identity.pid) : system_fault("pidfd_open", errno);
    }
    // Compared after opening: a process that has the right start time now had the number when the descriptor was made.
    const Result<ProcessIdentity> seen = identify_process(identity.pid);
    ProcessHandle handle(std::move(pidfd), identity.pid);
    if (!seen.ok()) {
        const bool is_hidden = seen.fault().code() == Code::unavailable && !handle.has_exited();
        return is_hidden ? Status(Code::failed, "/proc does not show process " + std::to_string(identity.pid))
                         : seen.fault();
    }
    if (seen.value() != identity) {
        return gone(identity.pid);
    }
    return handle;
}

Result<ProcessHandle> ProcessHandle::adopt(FileDescriptor pidfd) {
    const std::optional<pid_t> pid = read_pid_of(pidfd.number());
    if (!pid) {
        return Status(Code::invalid, "the descriptor received for a process is not a pidfd");
    }
    if (fcntl(pidfd.number(), F_SETFD, FD_CLOEXEC) != 0) {
        return system_fault("FD_CLOEXEC on a pidfd", errno);
    }
    return ProcessHandle(std::move(pidfd), *pid);
}

bool ProcessHandle::has_exited() const noexcept {
    pollfd entry{pidfd_.number(), POLLIN, 0};
    int ready = 0;
    do {
        ready = poll(&entry, 1, 0);
    } while (ready < 0 && errno == EINTR);
    return ready > 0 && (entry.revents & kExited) != 0;
}

bool ProcessHandle::is_same(const ProcessHandle& other) const noexcept {
    const std::uint64_t mine = unique_number(file());
    return mine != 0 && mine == unique_number(other.file());
}

Result<std::vector<std::size_t>> wait_any_exit(std::span<const ProcessHandle* const> handles, int timeout_ms) {
    using Clock = std::chrono::steady_clock;
    std::vector<pollfd> entries;
    entries.reserve(handles.size());
    for (const ProcessHandle* const handle : handles) {
        entries.push_back({handle->file(), POLLIN, 0});
    }
    const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(std::max(timeout_ms, 0));
    int left_ms = timeout_ms;
    while (poll(entries.data(), entries.size(), left_ms) < 0) {
        if (errno != EINTR) {
            return system_fault("poll of " + std::to_string(entries.size()) + " processes", errno);
        }
        if (timeout_ms > 0) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
            left_ms = static_cast<int>(std::max<std::int64_t>(left, 0));
        }
    }
    std::vector<std::size_t> exited;
    for (std::size_t place = 0; place < entries.size(); ++place) {
        if ((entries[place].revents & kExited) != 0) {
            exited.push_back(place);
        }
    }
    return exited;
}

}  // namespace kvo
