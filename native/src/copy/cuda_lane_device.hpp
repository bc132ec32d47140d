// The resources that a lane takes from its device and gives back.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "copy/copy_plan.hpp"
#include "copy/copy_schedule.hpp"
#include "copy/copy_tickets.hpp"
#include "copy/cuda_events.hpp"
#include "copy/cuda_job.hpp"
#include "copy/cuda_parts.hpp"
#include "copy/cuda_ranges.hpp"
#include "copy/cuda_settings.hpp"
#include "copy/record_digests.hpp"

namespace kvo {

// The state that the lanes of a CUDA engine share.

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

// Used by the lane's thread. If opening has failed, close gives back the resources that were taken before.
class CudaLaneDevice {
public:
    explicit CudaLaneDevice(CudaGround& ground) : ground_(ground), api_(ground.api) {}

    // Streams, host memory and events. The context is current from then on.
    Status open();
    // An engine without kernels is slow with small pages, and right: then the ground knows why.
    void open_kernels();
    void close();

    CudaStream kernels() const noexcept { return kernels_; }
    CudaStream transfers() const noexcept { return transfers_; }
    CudaFunction copy_runs() const noexcept { return copy_runs_; }  // null: batch is the only way
    CudaFunction fetch() const noexcept { return fetch_; }

    // Resources for parts; stagings only if there are kernels.
    const std::vector<CudaPlace>& places() const noexcept { return places_; }
    std::vector<CudaBounce> bounces() const;
    std::vector<CudaStaging> stagings() const;
    // The memory of the lists of runs: as the host calls it, as the device calls that, and the device's own.
    std::uint8_t* host_lists() const;
    CudaAddress mapped_lists() const;
    CudaAddress device_lists() const;

private:
    Status open_places();
    Status load_kernels();
    void close_kernels();
    std::uint64_t buffers_bytes() const;

    CudaGround& ground_;
    const CudaApi& api_;
    CudaStream kernels_ = nullptr;
    CudaStream transfers_ = nullptr;
    CudaModule module_ = nullptr;
    CudaFunction copy_runs_ = nullptr;
    CudaFunction fetch_ = nullptr;
    CudaAddress device_memory_ = 0;
    void* host_memory_ = nullptr;
    CudaAddress mapped_memory_ = 0;
    std::vector<CudaPlace> places_;  // with their events, and free
};

// Judges, for one lane, from the driver's answers whether the device is lost.
//
// For the lane's thread.
class CudaLaneFaults {
public:
    explicit CudaLaneFaults(CudaGround& ground) : ground_(ground) {}

    // Takes a poll's answer other than success. A strange one says nothing about the work, so the lane polls again; but
    // a device that has given no other answer for a while counts as lost and takes no new plans.
    void doubt(const char* function, CudaStatus status);
    void trust() { strange_.reset(); }
    bool is_doubting() const noexcept { return strange_.has_value(); }

    enum class Streams : std::uint8_t { running, empty, ended };
    // The state of all work that both streams were given.
    Streams query_streams(const CudaLaneDevice& device);

private:
    struct Strange {
        std::chrono::steady_clock::time_point since;
        int count = 0;
    };

    CudaGround& ground_;
    std::optional<Strange> strange_;  // since the last sensible answer to a poll
};

}  // namespace kvo
