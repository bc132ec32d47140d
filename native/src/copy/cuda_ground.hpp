// The state that the lanes of a CUDA engine share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "copy/copy_order.hpp"
#include "copy/copy_tickets.hpp"
#include "copy/cuda_events.hpp"
#include "copy/cuda_lane_queue.hpp"
#include "copy/cuda_ranges.hpp"
#include "copy/cuda_settings.hpp"
#include "copy/record_digests.hpp"
#include "copy/shared_blocks.hpp"

namespace kvo {

// It outlives the lanes.
struct CudaGround {
    CudaGround(const CudaApi& driver, const CudaSettings& chosen, PageTable table)
        : api(driver),
          settings(chosen),
          pages(std::move(table)),
          shared_blocks(pages),
          events(api),
          tickets(chosen.limits.plans),
          ways(std::make_shared<const WayTable>(chosen.ways)) {}

    const CudaApi api;
    const CudaSettings settings;
    const PageTable pages;  // that have passed their check
    const SharedBlocks shared_blocks;
    CudaDeviceId device = 0;
    CudaContext context = nullptr;
    std::uint32_t kernel_blocks = 1;
    CudaEventPool events;
    CopyTickets tickets;
    CopyOrder order;
    std::unique_ptr<CudaRanges> ranges;
    std::unique_ptr<RecordDigests> digests;
    std::atomic<bool> is_lost{false};
    std::vector<CudaLaneQueue*> lanes;  // none comes or goes while a thread of theirs runs
    // Something has ended that a lane may sleep for.
    void wake_lanes() noexcept {
        for (CudaLaneQueue* const lane : lanes) {
            lane->wake();
        }
    }
    // The device is lost, says this status of that call.
    void lose(const char* function, CudaStatus status);

    std::mutex mutex;  // of the following
    std::shared_ptr<const WayTable> ways;
    std::string kernel_problem;  // why there is no other way than batch; empty: there is
    std::string loss;            // what the driver said when the device was lost
};

}  // namespace kvo
