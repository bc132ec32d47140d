#include "copy/cuda_events.hpp"

#include <string>

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

}  // namespace kvo
