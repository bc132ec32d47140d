#include "io/thread_engine.hpp"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {
namespace {

std::int64_t do_request(const IoRequest& request) {
    for (;;) {
        const auto offset = static_cast<off_t>(request.offset);
        const ssize_t done = request.kind == IoKind::read ? pread(request.file, request.address, request.length, offset)
                             : request.kind == IoKind::write
                                 ? pwrite(request.file, request.address, request.length, offset)
                                 : fdatasync(request.file);
        if (done >= 0) {
            return done;
        }
        if (errno != EINTR) {
            return -errno;
        }
    }
}

}  // namespace

// Owned by the engine and each thread, so that a thread that outlives the engine still has it.
class ThreadEngine::Core {
public:
    static Status start(const std::shared_ptr<Core>& core, std::size_t depth);

    std::size_t depth() const noexcept { return depth_; }
    int file() const noexcept { return ended_file_.number(); }
    std::size_t submit(std::span<const IoRequest> requests);
    void poll(std::vector<IoEnd>& ended);
    bool close(int timeout_ms);

private:
    void run();

    FileDescriptor ended_file_;
    std::size_t depth_ = 0;
    std::mutex lock_;
    std::condition_variable work_;
    std::condition_variable idle_;
    std::deque<IoRequest> waiting_;
    std::vector<IoEnd> ended_;
    std::size_t under_way_ = 0;  // taken and not yet polled
    std::size_t running_ = 0;    // taken and not yet ended
    bool is_closing_ = false;
};

Status ThreadEngine::Core::start(const std::shared_ptr<Core>& core, std::size_t depth) {
    core->ended_file_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!core->ended_file_.is_open()) {
        return system_fault("eventfd", errno);
    }
    try {
        for (; core->depth_ < depth; ++core->depth_) {
            std::thread([core] {
                pthread_setname_np(pthread_self(), "kvoffload-io");
                core->run();
            }).detach();
        }
    } catch (const std::system_error& fault) {
        if (core->depth_ == 0) {
            return {Code::failed, std::string("no thread for I/O can be started: ") + fault.what()};
        }
    }
    return {};
}

std::size_t ThreadEngine::Core::submit(std::span<const IoRequest> requests) {
    std::size_t count = 0;
    {
        const std::lock_guard hold(lock_);
        count = std::min(requests.size(), depth_ - under_way_);
        waiting_.insert(waiting_.end(), requests.begin(), requests.begin() + static_cast<std::ptrdiff_t>(count));
        under_way_ += count;
        running_ += count;
    }
    for (std::size_t i = 0; i < count; ++i) {
        work_.notify_one();
    }
    return count;
}

void ThreadEngine::Core::poll(std::vector<IoEnd>& ended) {
    // Under the lock, as it is written: what ends in between would be taken here and announced once more.
    const std::lock_guard hold(lock_);
    std::uint64_t count = 0;
    static_cast<void>(!read(ended_file_.number(), &count, sizeof count));
    ended.insert(ended.end(), ended_.begin(), ended_.end());
    under_way_ -= ended_.size();
    ended_.clear();
}

bool ThreadEngine::Core::close(int timeout_ms) {
    std::unique_lock hold(lock_);
    is_closing_ = true;
    work_.notify_all();
    return idle_.wait_for(hold, std::chrono::milliseconds(timeout_ms), [this] { return running_ == 0; });
}

void ThreadEngine::Core::run() {
    std::unique_lock hold(lock_);
    for (;;) {
        work_.wait(hold, [this] { return is_closing_ || !waiting_.empty(); });
        if (waiting_.empty()) {
            return;
        }
        const IoRequest request = waiting_.front();
        waiting_.pop_front();
        hold.unlock();
        const std::int64_t outcome = do_request(request);
        hold.lock();
        ended_.push_back({request.token, outcome});
        if (--running_ == 0) {
            idle_.notify_all();
        }
        const std::uint64_t one = 1;
        static_cast<void>(!write(ended_file_.number(), &one, sizeof one));
    }
}

ThreadEngine::ThreadEngine(std::shared_ptr<Core> core) : core_(std::move(core)) {}

ThreadEngine::~ThreadEngine() { core_->close(0); }

Result<std::unique_ptr<IoEngine>> ThreadEngine::create(std::size_t depth) {
    auto core = std::make_shared<Core>();
    if (Status status = Core::start(core, depth); !status.ok()) {
        return status;
    }
    return std::unique_ptr<IoEngine>(new ThreadEngine(std::move(core)));
}

std::size_t ThreadEngine::depth() const noexcept { return core_->depth(); }

std::size_t ThreadEngine::submit(std::span<const IoRequest> requests) { return core_->submit(requests); }

void ThreadEngine::poll(std::vector<IoEnd>& ended) { core_->poll(ended); }

int ThreadEngine::file() const noexcept { return core_->file(); }

bool ThreadEngine::close(int timeout_ms) { return core_->close(timeout_ms); }

}  // namespace kvo
