#include "io/uring_engine.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <system_error>
#include <utility>

#include "base/status.hpp"
#include "io/uring_abi.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {
namespace {

// A part of the ring that the kernel shares with us.
class RingMapping {
public:
    RingMapping() noexcept = default;
    ~RingMapping() {
        if (start_ != nullptr) {
            munmap(start_, bytes_);
        }
    }
    RingMapping(const RingMapping&) = delete;
    RingMapping& operator=(const RingMapping&) = delete;

    Status map(int ring, std::size_t bytes, std::uint64_t offset) {
        void* const start =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, static_cast<off_t>(offset));
        if (start == MAP_FAILED) {
            return system_fault("mmap of an io_uring", errno);
        }
        start_ = static_cast<std::byte*>(start);
        bytes_ = bytes;
        return {};
    }
    template <typename Item>
    Item* at(std::uint32_t offset) const noexcept {
        return reinterpret_cast<Item*>(start_ + offset);
    }

private:
    std::byte* start_ = nullptr;
    std::size_t bytes_ = 0;
};

std::uint32_t load_shared(std::uint32_t* number) {
    return std::atomic_ref<std::uint32_t>(*number).load(std::memory_order_acquire);
}

void store_shared(std::uint32_t* number, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(*number).store(value, std::memory_order_release);
}

bool can_read_and_write(int ring) {
    uring::Probe probe{};
    if (syscall(uring::kRegister, ring, uring::kRegisterProbe, &probe, uring::kProbedOperations) != 0) {
        return false;
    }
    const auto is_supported = [&probe](std::uint8_t operation) {
        return operation < probe.operation_count &&
               (probe.operations[operation].flags & uring::kOperationSupported) != 0;
    };
    return is_supported(uring::kOpRead) && is_supported(uring::kOpWrite) && is_supported(uring::kOpFsync);
}

}  // namespace

class UringEngine::Ring {
public:
    Status open(std::size_t depth);
    std::size_t depth() const noexcept { return depth_; }
    int file() const noexcept { return ended_.number(); }
    std::size_t under_way() const noexcept { return under_way_; }

    std::size_t submit(std::span<const IoRequest> requests);
    void poll(std::vector<IoEnd>& ended);

private:
    void put(const IoRequest& request);
    void enter();

    FileDescriptor ring_;
    FileDescriptor ended_;
    RingMapping submission_;
    RingMapping completion_;
    RingMapping entries_;
    uring::Parameters terms_{};
    std::size_t depth_ = 0;
    std::size_t under_way_ = 0;      // given to the ring and not yet polled
    std::uint32_t not_entered_ = 0;  // in the ring, and not yet taken by the kernel
};

Status UringEngine::Ring::open(std::size_t depth) {
    ring_ = FileDescriptor(static_cast<int>(syscall(uring::kSetup, depth, &terms_)));
    if (!ring_.is_open()) {
        return io_uring_refusal(errno);
    }
    if (!can_read_and_write(ring_.number())) {
        return {Code::unavailable, "this kernel's io_uring cannot read and write; 5.6 and later can"};
    }
    const std::size_t submission_bytes = terms_.submission.array + terms_.submission_entries * sizeof(std::uint32_t);
    const std::size_t completion_bytes =
        terms_.completion.entries + terms_.completion_entries * sizeof(uring::Completion);
    const std::size_t entries_bytes = terms_.submission_entries * sizeof(uring::Submission);
    if (Status status = submission_.map(ring_.number(), submission_bytes, uring::kOffsetSubmissionRing); !status.ok()) {
        return status;
    }
    if (Status status = completion_.map(ring_.number(), completion_bytes, uring::kOffsetCompletionRing); !status.ok()) {
        return status;
    }
    if (Status status = entries_.map(ring_.number(), entries_bytes, uring::kOffsetEntries); !status.ok()) {
        return status;
    }
    ended_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!ended_.is_open()) {
        return system_fault("eventfd", errno);
    }
    const int number = ended_.number();
    if (syscall(uring::kRegister, ring_.number(), uring::kRegisterEventfd, &number, 1) != 0) {
        return system_fault("io_uring_register(IORING_REGISTER_EVENTFD)", errno);
    }
    // The kernel has twice as many completions, so none is ever without a place.
    depth_ = std::min<std::size_t>(depth, terms_.submission_entries);
    return {};
}

void UringEngine::Ring::put(const IoRequest& request) {
    std::uint32_t* const tail = submission_.at<std::uint32_t>(terms_.submission.tail);
    const std::uint32_t mask = *submission_.at<std::uint32_t>(terms_.submission.ring_mask);
    const std::uint32_t place = *tail & mask;
    uring::Submission entry{};
    entry.operation = request.kind == IoKind::read    ? uring::kOpRead
                      : request.kind == IoKind::write ? uring::kOpWrite
                                                      : uring::kOpFsync;
    entry.file = request.file;
    entry.user_data = request.token;
    if (request.kind == IoKind::sync) {
        entry.operation_flags = uring::kFsyncDatasync;
    } else {
        entry.offset = request.offset;
        entry.address = reinterpret_cast<std::uint64_t>(request.address);
        entry.length = request.length;
    }
    entries_.at<uring::Submission>(0)[place] = entry;
    submission_.at<std::uint32_t>(terms_.submission.array)[place] = place;
    store_shared(tail, *tail + 1);
}

// Submits the entries of the ring. Those that the kernel does not take, because it is short of memory, are offered
// again at the next call.
void UringEngine::Ring::enter() {
    while (not_entered_ > 0) {
        const long taken = syscall(uring::kEnter, ring_.number(), not_entered_, 0, 0, nullptr, 0);
        if (taken < 0 && errno == EINTR) {
            continue;
        }
        if (taken <= 0) {
            return;
        }
        not_entered_ -= static_cast<std::uint32_t>(taken);
    }
}

std::size_t UringEngine::Ring::submit(std::span<const IoRequest> requests) {
    const std::size_t count = std::min(requests.size(), depth_ - under_way_);
    for (const IoRequest& request : requests.first(count)) {
        put(request);
    }
    under_way_ += count;
    not_entered_ += static_cast<std::uint32_t>(count);
    enter();
    return count;
}

void UringEngine::Ring::poll(std::vector<IoEnd>& ended) {
    enter();
    std::uint64_t count = 0;
    static_cast<void>(!read(ended_.number(), &count, sizeof count));  // before looking: what ends later is told again
    std::uint32_t* const head = completion_.at<std::uint32_t>(terms_.completion.head);
    const std::uint32_t mask = *completion_.at<std::uint32_t>(terms_.completion.ring_mask);
    const std::uint32_t tail = load_shared(completion_.at<std::uint32_t>(terms_.completion.tail));
    std::uint32_t next = *head;
    for (; next != tail; ++next) {
        const uring::Completion& one = completion_.at<uring::Completion>(terms_.completion.entries)[next & mask];
        ended.push_back({one.user_data, one.result});
        --under_way_;
    }
    store_shared(head, next);
}

UringEngine::UringEngine(std::unique_ptr<Ring> ring) : ring_(std::move(ring)) {}

UringEngine::~UringEngine() = default;

Result<std::unique_ptr<IoEngine>> UringEngine::create(std::size_t depth) {
    auto ring = std::make_unique<Ring>();
    if (Status status = ring->open(depth); !status.ok()) {
        return status;
    }
    return std::unique_ptr<IoEngine>(new UringEngine(std::move(ring)));
}

std::size_t UringEngine::depth() const noexcept { return ring_->depth(); }

std::size_t UringEngine::submit(std::span<const IoRequest> requests) { return ring_->submit(requests); }

void UringEngine::poll(std::vector<IoEnd>& ended) { ring_->poll(ended); }

int UringEngine::file() const noexcept { return ring_->file(); }

bool UringEngine::close(int timeout_ms) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
    std::vector<IoEnd> ended;
    for (ring_->poll(ended); ring_->under_way() > 0; ring_->poll(ended)) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
        pollfd waited{ring_->file(), POLLIN, 0};
        if (left <= 0 || ::poll(&waited, 1, static_cast<int>(left)) == 0) {
            break;
        }
    }
    return ring_->under_way() == 0;
}

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
