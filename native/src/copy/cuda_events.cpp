#include "copy/cuda_events.hpp"

#include <pthread.h>

#include <string>
#include <system_error>

namespace kvo {

PooledEvent::~PooledEvent() { pool_->give_back(event_); }

Result<SharedEvent> CudaEventPool::take() {
    CudaEvent event = nullptr;
    {
        const std::lock_guard lock(mutex_);
        if (!free_.empty()) {
            event = free_.back();
            free_.pop_back();
        } else {
            free_.reserve(++made_);
        }
    }
    if (event == nullptr) {
        const CudaStatus status = api_.cuEventCreate(&event, kCudaEventDisableTiming | kCudaEventBlockingSync);
        if (status != kCudaSuccess) {
            return Status(Code::failed, "cuEventCreate: " + api_.driver.describe(status));
        }
    }
    try {
        return SharedEvent(std::make_shared<PooledEvent>(*this, event));
    } catch (...) {
        give_back(event);
        throw;
    }
}

Status CudaEventPool::fill(std::size_t count) {
    std::vector<SharedEvent> taken;
    taken.reserve(count);
    while (taken.size() < count) {
        Result<SharedEvent> event = take();
        if (!event.ok()) {
            return event.fault();
        }
        taken.push_back(std::move(event.value()));
    }
    return {};
}

void CudaEventPool::destroy() {
    const std::lock_guard lock(mutex_);
    for (const CudaEvent event : free_) {
        api_.cuEventDestroy(event);
    }
    free_.clear();
}

void CudaEventPool::give_back(CudaEvent event) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
}

Result<std::unique_ptr<CudaWatch>> CudaWatch::start(const CudaApi& api, CudaContext context,
                                                    std::function<void()> on_seen) {
    std::unique_ptr<CudaWatch> watch(new CudaWatch(api, context, std::move(on_seen)));
    try {
        watch->thread_ = std::thread([self = watch.get()] { self->run(); });
    } catch (const std::system_error& fault) {
        return Status(Code::failed, std::string("no thread that waits for the device can be started: ") + fault.what());
    }
    return watch;
}

CudaWatch::~CudaWatch() {
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
        changed_.notify_all();
    }
    if (thread_.joinable()) {
        thread_.join();
    }
}

bool CudaWatch::has_seen(const SharedEvent& event) {
    const std::lock_guard lock(mutex_);
    if (event_ != event) {
        event_ = event;
        is_seen_ = false;
        changed_.notify_all();
    }
    return is_seen_;
}

void CudaWatch::run() {
    pthread_setname_np(pthread_self(), "kvoffload-watch");
    int mode = kCudaCaptureModeRelaxed;
    api_.cuThreadExchangeStreamCaptureMode(&mode);
    api_.cuCtxSetCurrent(context_);
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return is_stopping_ || (event_ != nullptr && !is_seen_); });
        if (is_stopping_) {
            return;
        }
        const SharedEvent event = event_;
        lock.unlock();
        // The status is ignored: if an event cannot be waited for, the lane polls it, and also learns of losses.
        api_.cuEventSynchronize(event->get());
        lock.lock();
        if (event_ == event) {
            is_seen_ = true;
            lock.unlock();
            on_seen_();
            lock.lock();
        }
    }
}

}  // namespace kvo
