// Events of the driver, made once and used again: a pool, and handles that bring them back by themselves.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "shim/cuda_api.hpp"

namespace kvo {

class CudaEventPool;

// An event that only its user records. When the last handle goes, the event is back in the pool, on whatever thread
// that is, without a call to the driver.
class PooledEvent {
public:
    PooledEvent(CudaEventPool& pool, CudaEvent event) noexcept : pool_(&pool), event_(event) {}
    ~PooledEvent();
    PooledEvent(const PooledEvent&) = delete;
    PooledEvent& operator=(const PooledEvent&) = delete;

    CudaEvent get() const noexcept { return event_; }
    bool is_of(const CudaEventPool& pool) const noexcept { return pool_ == &pool; }

private:
    CudaEventPool* pool_;
    CudaEvent event_;
};

using SharedEvent = std::shared_ptr<const PooledEvent>;

// Safe to call from any thread whose current context is that of the events. Outlives all handles.
class CudaEventPool {
public:
    explicit CudaEventPool(const CudaApi& api) : api_(api) {}
    CudaEventPool(const CudaEventPool&) = delete;
    CudaEventPool& operator=(const CudaEventPool&) = delete;

    // One that is free, or a new one. Code::failed with the driver's words; throws std::bad_alloc.
    Result<SharedEvent> take();
    // Makes this many events now, while nothing waits for them.
    Status fill(std::size_t count);
    // Gives all that are free back to the driver. What this reports would be of earlier work, so nothing is.
    void destroy();

private:
    friend class PooledEvent;
    void give_back(CudaEvent event) noexcept;

    const CudaApi& api_;
    std::mutex mutex_;
    std::vector<CudaEvent> free_;  // with room for all there are, so that giving back needs no memory
    std::size_t made_ = 0;
};

}  // namespace kvo
