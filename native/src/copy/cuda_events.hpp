// Events of the driver, made once and used again: a pool, and handles that bring them back by themselves.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
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

// Waits for an event in a call of the driver that sleeps, on a thread of its own, so that no thread needs to poll for
// it.
//
// Used by one thread. What it watches comes, or the device is lost: until then it cannot end.
class CudaWatch {
public:
    // `on_seen` is called by the watch's own thread and must not call the watch. Code::failed: no thread can be had.
    static Result<std::unique_ptr<CudaWatch>> start(const CudaApi& api, CudaContext context,
                                                    std::function<void()> on_seen);
    ~CudaWatch();
    CudaWatch(const CudaWatch&) = delete;
    CudaWatch& operator=(const CudaWatch&) = delete;

    // Whether the event has come, or the driver does not wait for it. If not it is watched from here on, in place of
    // what was before.
    bool has_seen(const SharedEvent& event);

private:
    CudaWatch(const CudaApi& api, CudaContext context, std::function<void()> on_seen)
        : api_(api), context_(context), on_seen_(std::move(on_seen)) {}
    void run();

    const CudaApi& api_;
    const CudaContext context_;
    const std::function<void()> on_seen_;
    std::mutex mutex_;  // of the following
    std::condition_variable changed_;
    SharedEvent event_;
    bool is_seen_ = false;
    bool is_stopping_ = false;
    std::thread thread_;
};

}  // namespace kvo
