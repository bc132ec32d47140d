// A plan on its way through a lane.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "base/status.hpp"
#include "copy/copy_plan.hpp"
#include "copy/copy_tickets.hpp"
#include "copy/cuda_events.hpp"
#include "copy/cuda_settings.hpp"
#include "copy/record_digests.hpp"
#include "copy/run_list.hpp"

namespace kvo {

// Made by who submits; from then on the lane's thread's.
struct CudaJob {
    CopyTicket ticket = 0;
    std::shared_ptr<const CopyPlan> plan;
    SharedEvent after;  // null: nothing to wait for, or it is known to have come

    std::optional<RunList> runs;
    CopyWay way = CopyWay::batch;
    std::uint64_t issued = 0;                     // of its row
    std::size_t part_count = 0;                   // with the device
    std::chrono::steady_clock::time_point begun;  // seen to be free to move bytes
    std::chrono::nanoseconds copied{0};
    SharedEvent done;  // follows all of it
    Status status;
    std::shared_ptr<DigestWork> digests;  // being made

    bool uses_kernels() const noexcept { return way != CopyWay::batch; }
};

// Moved from list to list as nodes, which needs no memory.
using CudaJobs = std::list<CudaJob>;

// Requests of other threads to a lane's thread: to copy plans, to wake up, and to end.
//
// For any thread, except what is said to be for the lane's.
class CudaLaneQueue {
public:
    // Takes the list's one job. Not after begin_close.
    void submit(CudaJobs job) noexcept;
    void wake() noexcept;
    // Begins to close: queued plans fail, running ones go on.
    void begin_close();
    // False: something still runs, and stops as soon as it can. May be asked again.
    bool wait_closed(int timeout_ms);

    // The lane's thread, which alone takes jobs: it has all it needs, begins to look what there is to do, and has given
    // everything back.
    void open();
    void begin_round();
    void end();
    // The thread waits, for at most `longest`, until it is woken; none: it goes on at once. If nothing is on its way it
    // waits for jobs. False: there are none, and none follow.
    bool wait(bool is_idle, std::optional<std::chrono::microseconds> longest);

    // The first job's, if there is one.
    std::optional<CopyTicket> first_ticket();
    // A list of it, or an empty list.
    CudaJobs take_first();

    struct Closing {
        bool has_begun = false;
        bool is_urgent = false;  // a caller has waited for it in vain
    };
    Closing closing();

private:
    std::mutex mutex_;  // of the following
    std::condition_variable changed_;
    CudaJobs jobs_;
    bool is_woken_ = false;
    bool is_closing_ = false;
    bool is_aborting_ = false;
    bool is_closed_ = true;  // no thread, nothing to give back
};

}  // namespace kvo
