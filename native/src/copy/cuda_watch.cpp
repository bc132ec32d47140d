#include "copy/cuda_watch.hpp"

#include <pthread.h>

#include <string>
#include <system_error>

namespace kvo {

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
