#include "copy/cuda_lane.hpp"

#include <pthread.h>

#include <chrono>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

namespace kvo {

CudaLane::~CudaLane() {
    if (thread_.joinable()) {
        thread_.join();
    }
}

Status CudaLane::open() {
    std::promise<Status> opened;
    std::future<Status> answer = opened.get_future();
    try {
        thread_ = std::thread([this, promise = std::move(opened)]() mutable { run(std::move(promise)); });
    } catch (const std::system_error& fault) {
        return {Code::failed, std::string("no thread for copies can be started: ") + fault.what()};
    }
    return answer.get();
}

void CudaLane::run(std::promise<Status> opened) {
    pthread_setname_np(pthread_self(), "kvoffload-gpu");
    Status status;
    try {
        status = open_device();
    } catch (const std::bad_alloc&) {
        status = Status(Code::failed, "no memory");
    }
    if (!status.ok()) {
        close_device();
        opened.set_value(std::move(status));
        return;
    }
    queue_.open();
    opened.set_value({});
    for (;;) {
        queue_.begin_round();
        std::optional<std::chrono::microseconds> longest;
        if (!step()) {
            longest = may_sleep() ? ground_.settings.longest_sleep : ground_.settings.poll_interval;
        }
        if (!queue_.wait(is_idle(), longest)) {
            break;
        }
    }
    close_device();
    queue_.end();
}

Status CudaLane::open_device() {
    if (Status status = device_.open(); !status.ok()) {
        return status;
    }
    Result<std::unique_ptr<CudaWatch>> watch =
        CudaWatch::start(ground_.api, ground_.context, [this] { queue_.wake(); });
    if (!watch.ok()) {
        return watch.fault();
    }
    watch_ = std::move(watch.value());
    device_.open_kernels();
    flow_.open();
    return {};
}

void CudaLane::close_device() {
    watch_.reset();
    device_.close();
}

// If an allocation fails on the way, the current plan fails and no other.
bool CudaLane::step() {
    try {
        poll_close();
        return work();
    } catch (const std::bad_alloc&) {
        flow_.fail_current({Code::failed, "no memory"});
        return false;
    }
}

// Whether the lane has nothing to do until another thread wakes it: the watch, or one that ends a plan, loses the
// device, submits or closes.
bool CudaLane::may_sleep() {
    if (flow_.is_draining() || flow_.is_doubting() || ground_.is_lost.load() || !ends_.is_idle()) {
        return false;
    }
    if (flow_.is_idle()) {
        return true;  // what is queued may not begin before a plan of the other lane has ended
    }
    CudaJob& first = flow_.oldest();
    if (first.after != nullptr && watch_->has_seen(first.after)) {
        first.after.reset();
    }
    return first.after != nullptr;
}

bool CudaLane::work() {
    bool has_progressed = ends_.poll();
    if (ground_.is_lost.load()) {
        return poll_loss() || has_progressed;
    }
    if (flow_.is_draining()) {
        return flow_.poll_drain() || has_progressed;
    }
    has_progressed |= flow_.poll();
    if (!flow_.has_current() && !take_job()) {
        return has_progressed;
    }
    return flow_.issue() || has_progressed;
}

bool CudaLane::take_job() {
    const std::optional<CopyTicket> ticket = queue_.first_ticket();
    if (!ticket) {
        return false;
    }
    // No other thread takes from the queue, and no lock is held while plans are compared.
    bool is_known = true;
    try {
        if (!ground_.order.may_begin(*ticket, ground_.pages)) {
            return false;
        }
    } catch (const std::bad_alloc&) {
        is_known = false;
    }
    flow_.take(queue_.take_first());
    if (is_known) {
        flow_.begin();
    } else {
        flow_.fail_current({Code::failed, "no memory"});
    }
    return true;
}

bool CudaLane::poll_loss() {
    std::unique_lock lock(ground_.mutex);
    const std::string why = ground_.loss.empty() ? "the device is lost" : ground_.loss;
    lock.unlock();
    flow_.fail_current({Code::failed, why});
    end_queue(why.c_str());
    return flow_.end_lost(why);
}

void CudaLane::poll_close() {
    const CudaLaneQueue::Closing closing = queue_.closing();
    if (closing.has_begun) {
        end_queue("the copy engine was closed before this copy began");
    }
    if (closing.is_urgent && flow_.has_current()) {
        flow_.fail_current({Code::failed, "the copy engine was closed during this copy"});
    }
}

void CudaLane::end_queue(const char* why) {
    for (;;) {
        Status status(Code::failed, why);
        CudaJobs one = queue_.take_first();
        if (one.empty()) {
            return;
        }
        one.front().status = std::move(status);
        ends_.tell(one.front());
    }
}

}  // namespace kvo
