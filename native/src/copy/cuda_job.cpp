#include "copy/cuda_job.hpp"

#include <utility>

namespace kvo {

void CudaLaneQueue::submit(CudaJobs job) noexcept {
    const std::lock_guard lock(mutex_);
    jobs_.splice(jobs_.end(), job);
    is_woken_ = true;
    changed_.notify_all();
}

void CudaLaneQueue::wake() noexcept {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
    changed_.notify_all();
}

void CudaLaneQueue::begin_close() {
    const std::lock_guard lock(mutex_);
    is_closing_ = is_woken_ = true;
    changed_.notify_all();
}

bool CudaLaneQueue::wait_closed(int timeout_ms) {
    std::unique_lock lock(mutex_);
    const bool is_closed =
        changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return is_closed_; });
    is_aborting_ = !is_closed;
    is_woken_ = true;
    changed_.notify_all();
    return is_closed;
}

void CudaLaneQueue::open() {
    const std::lock_guard lock(mutex_);
    is_closed_ = false;
}

void CudaLaneQueue::begin_round() {
    const std::lock_guard lock(mutex_);
    is_woken_ = false;
}

void CudaLaneQueue::end() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
}

bool CudaLaneQueue::wait(bool is_idle, std::optional<std::chrono::microseconds> longest) {
    std::unique_lock lock(mutex_);
    if (is_idle && jobs_.empty()) {
        if (is_closing_) {
            return false;
        }
        changed_.wait(lock, [this] { return is_closing_ || !jobs_.empty(); });
    } else if (longest) {
        changed_.wait_for(lock, *longest, [this] { return is_woken_; });
    }
    return true;
}

std::optional<CopyTicket> CudaLaneQueue::first_ticket() {
    const std::lock_guard lock(mutex_);
    return jobs_.empty() ? std::nullopt : std::optional(jobs_.front().ticket);
}

CudaJobs CudaLaneQueue::take_first() {
    CudaJobs one;
    const std::lock_guard lock(mutex_);
    if (!jobs_.empty()) {
        one.splice(one.end(), jobs_, jobs_.begin());
    }
    return one;
}

CudaLaneQueue::Closing CudaLaneQueue::closing() {
    const std::lock_guard lock(mutex_);
    return {is_closing_, is_aborting_};
}

}  // namespace kvo
