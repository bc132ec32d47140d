// A process that is stopped at a place of its own choice, taken on by single instructions, and killed; and the files
// it leaves, sent to us over a socket.
#pragma once

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/cache_core.hpp"
#include "index/index_view.hpp"

namespace kvo::test {

// Memory of one object that we share with our children.
template <typename Item>
class SharedItem {
public:
    SharedItem() {
        void* const start = mmap(nullptr, sizeof(Item), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) {
            throw std::runtime_error("mmap failed");
        }
        item_ = new (start) Item();
    }
    ~SharedItem() { munmap(item_, sizeof(Item)); }
    SharedItem(const SharedItem&) = delete;
    SharedItem& operator=(const SharedItem&) = delete;

    Item& operator*() const { return *item_; }
    Item* operator->() const { return item_; }

private:
    Item* item_;
};

// The files of a cache, in the order lock, index, segments.
inline void send_files(int socket, const FileNumbers& files) {
    std::vector<int> numbers = {files.lock, files.index};
    numbers.insert(numbers.end(), files.segments.begin(), files.segments.end());
    std::vector<char> control(CMSG_SPACE(numbers.size() * sizeof(int)));
    auto count = static_cast<char>(numbers.size());
    iovec part{&count, 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(numbers.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), numbers.data(), numbers.size() * sizeof(int));
    if (sendmsg(socket, &message, MSG_NOSIGNAL) != 1) {
        throw std::runtime_error("the files could not be sent");
    }
}
inline CacheFiles receive_files(int socket) {
    constexpr std::size_t kMost = 16;
    std::vector<char> control(CMSG_SPACE(kMost * sizeof(int)));
    char count = 0;
    iovec part{&count, 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const cmsghdr* const header = recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
        throw std::runtime_error("no files came");
    }
    std::vector<int> numbers(static_cast<std::size_t>(count));
    std::memcpy(numbers.data(), CMSG_DATA(header), numbers.size() * sizeof(int));
    CacheFiles files;
    files.lock = FileDescriptor(numbers.at(0));
    files.index = FileDescriptor(numbers.at(1));
    for (std::size_t i = 2; i < numbers.size(); ++i) {
        files.segments.emplace_back(numbers[i]);
    }
    return files;
}

// Reads an index from a process that outlives the processes that write it.
class IndexReader {
public:
    explicit IndexReader(int file, std::uint64_t bytes) : bytes_(bytes) {
        start_ = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
        if (start_ == MAP_FAILED) {
            throw std::runtime_error("the index cannot be mapped");
        }
        const auto view = view_index({static_cast<std::byte*>(start_), bytes_});
        if (!view.ok()) {
            throw std::runtime_error(view.fault().message());
        }
        view_ = view.value();
    }
    ~IndexReader() { munmap(start_, bytes_); }
    IndexReader(const IndexReader&) = delete;
    IndexReader& operator=(const IndexReader&) = delete;

    const IndexView& view() const { return view_; }

private:
    std::uint64_t bytes_;
    void* start_;
    IndexView view_;
};

// Sees each store of another process to what an adoption will read.
class IndexWatch {
public:
    explicit IndexWatch(const IndexView& view) {
        const IndexHeader& header = *view.header;
        const auto add = [this](const void* start, std::size_t bytes) {
            parts_.push_back({static_cast<const char*>(start), bytes, {}});
        };
        add(view.header, sizeof(IndexHeader));
        add(view.entries, std::min(header.entry_count + 8, header.entry_limit) * sizeof(Entry));
        add(view.digests, std::min(header.entry_count + 8, header.entry_limit) * sizeof(EntryDigest));
        add(view.lease_nodes, header.lease_node_count * sizeof(LeaseNode));
        for (std::uint32_t i = 0; i < header.session_count; ++i) {
            add(&view.sessions[i], offsetof(SessionRecord, members) + 4 * sizeof(MemberRecord));
        }
        if (header.bucket_count != 0) {
            add(view.buckets, std::min(header.bucket_count + 1, header.bucket_limit) * sizeof(Bucket));
        }
        for (Part& part : parts_) {
            part.seen.assign(part.start, part.start + part.bytes);
        }
    }

    bool has_changed() {
        for (Part& part : parts_) {
            if (std::memcmp(part.start, part.seen.data(), part.bytes) != 0) {
                part.seen.assign(part.start, part.start + part.bytes);
                return true;
            }
        }
        return false;
    }

private:
    struct Part {
        const char* start;
        std::size_t bytes;
        std::vector<char> seen;
    };
    std::vector<Part> parts_;
};

// A child that we trace. It runs natively until it stops itself by SIGSTOP, which it does before the call that the test
// will cut short, and again after it.
class TracedChild {
public:
    enum class Event : std::uint8_t { stopped, reached, stepped, ended };

    // `body()` returns the child's exit code.
    template <typename Body>
    explicit TracedChild(Body body) {
        pid_ = fork();
        if (pid_ == 0) {
            int code = 99;
            try {
                code = body();
            } catch (...) {
            }
            _exit(code);
        }
        if (pid_ < 0) {
            throw std::runtime_error("fork failed");
        }
    }
    ~TracedChild() { kill_and_reap(); }
    TracedChild(const TracedChild&) = delete;
    TracedChild& operator=(const TracedChild&) = delete;

    // The child calls this. False: this system does not let a parent trace it.
    static bool allow_tracing() { return ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0; }

    // Whether a process may be traced by its parent here.
    static bool can_trace() {
        TracedChild probe([] { return allow_tracing() ? 0 : 1; });
        return probe.wait() == Event::ended && probe.code() == 0;
    }

    int code() const { return code_; }  // once it has ended: exit code, or minus the signal

    Event wait() {
        int status = 0;
        while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
        }
        if (WIFSTOPPED(status)) {
            return WSTOPSIG(status) == SIGTRAP   ? Event::stepped
                   : WSTOPSIG(status) == SIGSTOP ? Event::stopped
                                                 : fail_by(WSTOPSIG(status));
        }
        code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        is_reaped_ = true;
        return Event::ended;
    }
    // Of a child that is not traced: until it says so, or has ended.
    Event wait_until(const std::atomic<bool>& says) {
        int status = 0;
        while (!says) {
            if (waitpid(pid_, &status, WNOHANG) == pid_) {
                code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
                is_reaped_ = true;
                return Event::ended;
            }
            sched_yield();
        }
        return Event::reached;
    }
    Event go_on() {
        ptrace(PTRACE_CONT, pid_, nullptr, nullptr);
        return wait();
    }
    Event step() {
        ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr);
        return wait();
    }
    // Lets the child run until it reaches this instruction for the `wanted`-th time; it has the instruction at the same
    // address as we do. Returns `stopped` if it stops itself before, after `hits` times.
    Event go_to(std::uintptr_t address, std::uint32_t wanted, std::uint32_t& hits) {
#if defined(__x86_64__)
        constexpr std::uint64_t kTrap = 0xcc;
        const auto place = reinterpret_cast<void*>(address);
        const auto code = static_cast<std::uint64_t>(ptrace(PTRACE_PEEKTEXT, pid_, place, nullptr));
        for (;;) {
            ptrace(PTRACE_POKETEXT, pid_, place, (code & ~std::uint64_t{0xff}) | kTrap);
            const Event event = go_on();
            if (event == Event::ended) {
                return event;
            }
            ptrace(PTRACE_POKETEXT, pid_, place, code);
            if (event != Event::stepped) {
                return event;
            }
            user_regs_struct registers{};
            ptrace(PTRACE_GETREGS, pid_, nullptr, &registers);
            registers.rip = address;
            ptrace(PTRACE_SETREGS, pid_, nullptr, &registers);
            if (++hits == wanted) {
                return Event::reached;
            }
            if (const Event next = step(); next != Event::stepped) {
                return next;
            }
        }
#else
        static_cast<void>(address);
        static_cast<void>(wanted);
        static_cast<void>(hits);
        return Event::reached;
#endif
    }

    void kill_and_reap() {
        if (!is_reaped_) {
            kill(pid_, SIGKILL);
            while (wait() != Event::ended) {
            }
        }
    }

private:
    // It has a fault of its own, which ends it.
    Event fail_by(int number) {
        ptrace(PTRACE_CONT, pid_, nullptr, number);
        return wait();
    }

    pid_t pid_ = -1;
    int code_ = 0;
    bool is_reaped_ = false;
};

}  // namespace kvo::test
