// The engine for CUDA: the driver alone, opened at run time; addresses and handles as numbers.
//
// Save and load are two lanes with threads of their own, so neither waits for the other. What a caller asks of the
// driver itself is to record an event, or to let a stream wait for one; everything else is done by threads that no
// graph capture and no current context of the caller's concerns. Plans that share bytes keep the order of their
// submission all the same.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "copy/copy_engine.hpp"
#include "copy/cuda_lane.hpp"

namespace kvo {

// A time limit; tells how much of it is left.
class Deadline {
public:
    explicit Deadline(int timeout_ms) : end_(Clock::now() + std::chrono::milliseconds(timeout_ms)) {}
    int left_ms() const {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()).count();
        return left < 0 ? 0 : static_cast<int>(left);
    }

private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point end_;
};

// After a fork the engine is the parent's. In the child, what can refuse does (Code::unavailable), poll has nothing,
// fence is false, and closing does nothing.
class CudaEngine final : public CopyEngine {
public:
    // Takes the device's primary context, and all the memory the engine will ever take of it. Initialises the driver in
    // this process. Code::invalid: the pages or settings are wrong. Code::failed with the driver's words.
    static Result<std::unique_ptr<CudaEngine>> open(const CudaApi& api, const CudaSettings& settings, PageTable pages);

    // Closes. What still runs after some seconds keeps the memory and the threads it has, for good.
    ~CudaEngine() override;
    CudaEngine(const CudaEngine&) = delete;
    CudaEngine& operator=(const CudaEngine&) = delete;

    // Slots in this memory are copied directly as soon as it is registered, which is done in the background; all others
    // by way of a buffer. The memory stays until close has succeeded, or until it is removed and nothing leaves any
    // more.
    Status add_host_range(std::uint64_t begin, std::uint64_t length);
    // Removes a range that was added. Plans on their way go on, and pieces that the device uses for them are waited for
    // in the background. Code::invalid: there is no such range.
    Status remove_host_range(std::uint64_t begin, std::uint64_t length);
    RegistrationProgress registration() const;
    // Waits until this many bytes are registered, or no more will be, or the time is over.
    void wait_registered(std::uint64_t bytes, int timeout_ms);

    // Sets the ways of plans that begin from now on.
    void set_ways(WayTable ways);
    // The reason why every plan goes by batch, whatever the table says, or empty if the table decides.
    std::string kernel_problem() const;

    // Where `stream` is now: all that it has been given so far. It has work of this engine's context. The point goes
    // before the engine does. Code::failed: the driver could not say, or the stream is being captured.
    Result<SharedEvent> mark(ComputeStream stream);
    // `after` is marked now.
    Result<CopyTicket> submit(CopyPlan plan, std::optional<ComputeStream> after) override;
    // The copies come after a point that was marked before, and not after what its stream has been given since. Null:
    // after nothing. Code::invalid: the point is another engine's.
    Result<CopyTicket> submit_after(CopyPlan plan, SharedEvent point);
    std::vector<FinishedCopy> poll() override;
    bool fence(int timeout_ms) override;
    // May be called again after Code::failed, and by several.
    Status close(int timeout_ms) override;

    // Orders later work of `stream` after the plan: it may use what that loads, or overwrite what it saves. Waits, for
    // at most `timeout_ms`, until the plan is with the device, because a stream that waits for an event before it is
    // recorded waits for nothing. Code::unavailable: it is not yet, or the engine is closed. Code::failed: the plan has
    // failed, or the stream is being captured. Code::invalid: there is no such ticket, or it has been told.
    Status make_wait(ComputeStream stream, CopyTicket ticket, int timeout_ms);

    // A fault of the whole device: every plan fails, as soon as nothing of it can move any more, or is refused.
    bool is_lost() const { return ground_->is_lost.load(); }

private:
    class Visit;

    explicit CudaEngine(std::unique_ptr<CudaGround> ground);

    Status start();
    Status open_parts();
    Status close_parts(const Deadline& deadline);
    bool is_of_this_process() const noexcept { return getpid() == process_; }
    // Whether what the stream is given runs. The context is current.
    Status check_stream(ComputeStream stream) const;
    Result<SharedEvent> record(ComputeStream stream);
    Result<CopyTicket> take(CopyPlan plan, SharedEvent point, std::optional<ComputeStream> stream);
    CudaLane& lane(CopyDirection direction) { return direction == CopyDirection::save ? *save_ : *load_; }

    const pid_t process_ = getpid();
    std::unique_ptr<CudaGround> ground_;
    std::unique_ptr<CudaLane> save_;
    std::unique_ptr<CudaLane> load_;
    std::mutex submit_mutex_;  // tickets reach order and lanes as they are numbered

    std::mutex visit_mutex_;  // of the following
    std::condition_variable visits_changed_;
    std::size_t visitors_ = 0;
    bool is_closing_ = false;  // no more callers are admitted
    bool is_somebody_closing_ = false;
    bool is_closed_ = false;
};

}  // namespace kvo
