// Preloaded into a process, makes calls of the kernel fail when a test says so, as under a limit of the machine. The
// test and the process share the file that KVOFFLOAD_TESTS_FAILING_CALLS names.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>

namespace {

// Their order is that of NAMES in tests/kit/failing_calls.py.
enum Name : std::int64_t {
    kMap,
    kMemfd,
    kTruncate,
    kOpen,
    kAccept,
    kSocket,
    kSocketpair,
    kEventfd,
    kPidfd,
    kDup,
    kPipe,
    kEpoll,
    kThread,
    kFork,
    kSend,
    kReceive,
    kWait,
    kNames
};

struct SharedCounts {
    std::atomic<std::int64_t> name;    // of the calls that fail; -1: none
    std::atomic<std::int64_t> first;   // the number of the first of them, from 0
    std::atomic<std::int64_t> last;    // and of the last
    std::atomic<std::int64_t> error;   // with which they fail
    std::atomic<std::int64_t> failed;  // how many have
    std::atomic<std::int64_t> counts[kNames];
};

SharedCounts* find_counts() {
    static std::atomic<SharedCounts*> found{nullptr};
    SharedCounts* shared = found.load();
    const char* const path = shared ? nullptr : std::getenv("KVOFFLOAD_TESTS_FAILING_CALLS");
    if (path) {
        const int saved = errno;
        const auto file = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC));
        if (file >= 0) {
            void* const map = reinterpret_cast<void*>(
                syscall(SYS_mmap, nullptr, sizeof(SharedCounts), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0L));
            syscall(SYS_close, file);
            shared = map == MAP_FAILED ? nullptr : static_cast<SharedCounts*>(map);
            found.store(shared);
        }
        errno = saved;
    }
    return shared;
}

// The error with which this call fails; 0: it does not.
int fault_of(Name name) {
    SharedCounts* const shared = find_counts();
    if (!shared) {
        return 0;
    }
    const std::int64_t number = shared->counts[name].fetch_add(1);
    if (shared->name.load() != name || number < shared->first.load() || number > shared->last.load()) {
        return 0;
    }
    shared->failed.fetch_add(1);
    return static_cast<int>(shared->error.load());
}

bool fails(Name name) {
    const int error = fault_of(name);
    errno = error == 0 ? errno : error;
    return error != 0;
}

template <typename Function>
Function* real(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

mode_t mode_of(int flags, va_list& more) { return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0; }

}  // namespace

// NOLINTBEGIN: these are the C library's names and types.
#pragma GCC visibility push(default)
extern "C" {

void* mmap(void* at, std::size_t length, int access, int flags, int file, off_t offset) {
    static auto* const next = real<decltype(mmap)>("mmap");
    // Not the interpreter's own memory, without which none of its threads goes on.
    return (flags & MAP_ANONYMOUS) == 0 && fails(kMap) ? MAP_FAILED : next(at, length, access, flags, file, offset);
}
void* mmap64(void* at, std::size_t length, int access, int flags, int file, off_t offset) {
    return mmap(at, length, access, flags, file, offset);
}

int memfd_create(const char* name, unsigned flags) noexcept {
    static auto* const next = real<decltype(memfd_create)>("memfd_create");
    return fails(kMemfd) ? -1 : next(name, flags);
}

int ftruncate(int file, off_t length) noexcept {
    static auto* const next = real<decltype(ftruncate)>("ftruncate");
    return fails(kTruncate) ? -1 : next(file, length);
}
int ftruncate64(int file, off_t length) noexcept { return ftruncate(file, length); }
int fallocate(int file, int mode, off_t offset, off_t length) {
    static auto* const next = real<decltype(fallocate)>("fallocate");
    return fails(kTruncate) ? -1 : next(file, mode, offset, length);
}
int fallocate64(int file, int mode, off_t offset, off_t length) { return fallocate(file, mode, offset, length); }

int open(const char* path, int flags, ...) {
    static auto* const next = real<decltype(open)>("open");
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_of(flags, more);
    va_end(more);
    return fails(kOpen) ? -1 : next(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
    static auto* const next = real<decltype(open64)>("open64");
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_of(flags, more);
    va_end(more);
    return fails(kOpen) ? -1 : next(path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
    static auto* const next = real<decltype(openat)>("openat");
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_of(flags, more);
    va_end(more);
    return fails(kOpen) ? -1 : next(folder, path, flags, mode);
}
int openat64(int folder, const char* path, int flags, ...) {
    static auto* const next = real<decltype(openat64)>("openat64");
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_of(flags, more);
    va_end(more);
    return fails(kOpen) ? -1 : next(folder, path, flags, mode);
}

int accept4(int end, sockaddr* who, socklen_t* length, int flags) {
    static auto* const next = real<decltype(accept4)>("accept4");
    return fails(kAccept) ? -1 : next(end, who, length, flags);
}
int accept(int end, sockaddr* who, socklen_t* length) {
    static auto* const next = real<decltype(accept)>("accept");
    return fails(kAccept) ? -1 : next(end, who, length);
}

int socket(int domain, int type, int protocol) noexcept {
    static auto* const next = real<decltype(socket)>("socket");
    return fails(kSocket) ? -1 : next(domain, type, protocol);
}
int socketpair(int domain, int type, int protocol, int ends[2]) noexcept {
    static auto* const next = real<decltype(socketpair)>("socketpair");
    return fails(kSocketpair) ? -1 : next(domain, type, protocol, ends);
}

int eventfd(unsigned count, int flags) noexcept {
    static auto* const next = real<decltype(eventfd)>("eventfd");
    return fails(kEventfd) ? -1 : next(count, flags);
}

// A pidfd of a connection's other end.
int getsockopt(int end, int level, int option, void* value, socklen_t* length) noexcept {
    static auto* const next = real<decltype(getsockopt)>("getsockopt");
    constexpr int kPeerPidfd = 77;
    return level == SOL_SOCKET && option == kPeerPidfd && fails(kPidfd) ? -1 : next(end, level, option, value, length);
}
long syscall(long number, ...) noexcept {
    static auto* const next = real<decltype(syscall)>("syscall");
    va_list more;
    va_start(more, number);
    long words[6];
    for (long& word : words) {
        word = va_arg(more, long);
    }
    va_end(more);
    const bool is_failing =
        (number == SYS_pidfd_open && fails(kPidfd)) || (number == SYS_memfd_create && fails(kMemfd));
    return is_failing ? -1 : next(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

int dup(int file) noexcept {
    static auto* const next = real<decltype(dup)>("dup");
    return fails(kDup) ? -1 : next(file);
}
int fcntl64(int file, int command, ...) {
    static auto* const next = real<decltype(fcntl64)>("fcntl64");
    va_list more;
    va_start(more, command);
    void* const word = va_arg(more, void*);
    va_end(more);
    return command == F_DUPFD_CLOEXEC && fails(kDup) ? -1 : next(file, command, word);
}
int fcntl(int file, int command, ...) {
    va_list more;
    va_start(more, command);
    void* const word = va_arg(more, void*);
    va_end(more);
    return fcntl64(file, command, word);
}

int pipe2(int ends[2], int flags) noexcept {
    static auto* const next = real<decltype(pipe2)>("pipe2");
    return fails(kPipe) ? -1 : next(ends, flags);
}

int epoll_create1(int flags) noexcept {
    static auto* const next = real<decltype(epoll_create1)>("epoll_create1");
    return fails(kEpoll) ? -1 : next(flags);
}
int epoll_ctl(int poller, int command, int file, epoll_event* event) noexcept {
    static auto* const next = real<decltype(epoll_ctl)>("epoll_ctl");
    return command == EPOLL_CTL_ADD && fails(kEpoll) ? -1 : next(poller, command, file, event);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* terms, void* (*run)(void*), void* about) noexcept {
    static auto* const next = real<decltype(pthread_create)>("pthread_create");
    const int error = fault_of(kThread);
    return error != 0 ? error : next(thread, terms, run, about);
}

pid_t fork() noexcept {
    static auto* const next = real<decltype(fork)>("fork");
    return fails(kFork) ? -1 : next();
}
// Those of an express channel. ZeroMQ's and Python's own sockets are waited for in other ways.
ssize_t send(int end, const void* bytes, std::size_t count, int flags) {
    static auto* const next = real<decltype(send)>("send");
    return (flags & MSG_DONTWAIT) != 0 && fails(kSend) ? -1 : next(end, bytes, count, flags);
}
ssize_t sendmsg(int end, const msghdr* message, int flags) {
    static auto* const next = real<decltype(sendmsg)>("sendmsg");
    return (flags & MSG_DONTWAIT) != 0 && fails(kSend) ? -1 : next(end, message, flags);
}
ssize_t recv(int end, void* bytes, std::size_t count, int flags) {
    static auto* const next = real<decltype(recv)>("recv");
    return (flags & MSG_DONTWAIT) != 0 && fails(kReceive) ? -1 : next(end, bytes, count, flags);
}
int ppoll(pollfd* files, nfds_t count, const timespec* timeout, const sigset_t* signals) {
    static auto* const next = real<decltype(ppoll)>("ppoll");
    return fails(kWait) ? -1 : next(files, count, timeout, signals);
}
pid_t vfork() noexcept { return fork(); }  // its caller could not return from here twice

}  // extern "C"
#pragma GCC visibility pop
// NOLINTEND
