// What a lane does when the driver refuses, when the device is lost, and when it is closed.
#include <utility>

#include "copy/cuda_codes.hpp"
#include "copy/cuda_lane.hpp"

namespace kvo {
namespace {

constexpr int kStrangeAnswers = 8;

}  // namespace

// What the current plan has with the device must end before its ticket does.
void CudaLane::fail_current(Status status) noexcept {
    if (current_.empty()) {
        return;
    }
    current_.front().status = std::move(status);
    running_.splice(running_.end(), current_);
    is_draining_ = true;
}

// Of a call for the current plan. Unless the device is lost the call alone was refused, whatever the code.
void CudaLane::fail_call(const char* function, CudaStatus status) {
    if (is_final(status)) {
        lose(function, status);
    } else {
        fail_current({Code::failed, std::string(function) + ": " + api_.driver.describe(status)});
    }
}

// Of a poll. An answer that is none says nothing about what was asked, so that is asked again; but a device that has
// given no other for a while takes no new plans.
void CudaLane::doubt(const char* function, CudaStatus status) {
    const auto now = std::chrono::steady_clock::now();
    if (is_final(status)) {
        lose(function, status);
    } else if (status == kCudaNotReady || is_capture_refusal(status)) {
        strange_.reset();
    } else {
        strange_ = strange_.value_or(Strange{now});
        const bool is_long = now - strange_->since > ground_.settings.strange_answers;
        if (++strange_->count > kStrangeAnswers && is_long) {
            lose(function, status);
        }
    }
}

void CudaLane::lose(const char* function, CudaStatus status) {
    ground_.is_lost.store(true);
    const std::string why = std::string("the device is lost, ") + function + ": " + api_.driver.describe(status);
    {
        const std::lock_guard lock(ground_.mutex);
        if (ground_.loss.empty()) {
            ground_.loss = why;
        }
    }
    ground_.wake_lanes();
}

CudaLane::Streams CudaLane::query_streams() {
    Streams found = Streams::empty;
    for (const CudaStream stream : {kernels_, transfers_}) {
        const CudaStatus status = api_.cuStreamQuery(stream);
        if (status == kCudaSuccess) {
            continue;
        }
        doubt("cuStreamQuery", status);
        if (!is_final(status)) {
            return Streams::running;
        }
        found = Streams::ended;
    }
    return found;
}

bool CudaLane::poll_drain() {
    // Of streams that have ended nobody knows what of their work was done: that is a loss.
    if (query_streams() != Streams::empty) {
        return false;
    }
    strange_.reset();
    is_draining_ = false;
    retire_all();
    while (!running_.empty()) {
        end_first();
    }
    return true;
}

// Nothing ends while a copy may still write: a code that leaves the context alive leaves its copies alive too.
bool CudaLane::poll_loss() {
    std::unique_lock lock(ground_.mutex);
    const std::string why = ground_.loss.empty() ? "the device is lost" : ground_.loss;
    lock.unlock();
    fail_current({Code::failed, why});
    end_queue(why.c_str());
    if (running_.empty() || query_streams() == Streams::running) {
        return false;
    }
    for (CudaJob& job : running_) {
        if (job.status.ok()) {
            job.status = Status(Code::failed, why);
        }
    }
    is_draining_ = false;
    retire_all();
    while (!running_.empty()) {
        end_first();
    }
    return true;
}

void CudaLane::poll_close() {
    std::unique_lock lock(mutex_);
    const bool is_closing = is_closing_;
    const bool is_aborting = is_aborting_;
    lock.unlock();
    if (is_closing) {
        end_queue("the copy engine was closed before this copy began");
    }
    if (is_aborting && !current_.empty()) {
        fail_current({Code::failed, "the copy engine was closed during this copy"});
    }
}

void CudaLane::end_queue(const char* why) {
    for (;;) {
        Status status(Code::failed, why);
        Jobs one;
        {
            const std::lock_guard lock(mutex_);
            if (queue_.empty()) {
                return;
            }
            one.splice(one.end(), queue_, queue_.begin());
        }
        one.front().status = std::move(status);
        tell(one.front());
    }
}

void CudaLane::retire_all() {
    while (place_count_ > 0) {
        retire(places_[first_place_]);
    }
}

}  // namespace kvo
