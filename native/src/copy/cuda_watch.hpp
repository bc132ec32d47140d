// Waits for an event in a call of the driver that sleeps, on a thread of its own, so that no thread needs to poll for
// it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "copy/cuda_events.hpp"

namespace kvo {

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
