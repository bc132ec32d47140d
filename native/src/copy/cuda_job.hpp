// A plan on its way through a lane.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>

#include "base/status.hpp"
#include "copy/copy_plan.hpp"
#include "copy/copy_tickets.hpp"
#include "copy/cuda_events.hpp"
#include "copy/cuda_way.hpp"
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

}  // namespace kvo
