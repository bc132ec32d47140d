// A lane's calls to the driver for one part of a plan.
//
//     staged save    kernels:   fetch, [staging free] gather ──crossed──┐
//                    transfers:                                         └─► DMA ──ended
//     staged load    transfers: [staging free] DMA ──crossed──┐
//                    kernels:   fetch                         └─► scatter ──ended
//     mapped         kernels:   fetch, gather or scatter ──ended
//     batch          transfers: DMA ──ended
//
// A kernel fetches the lists of the next. By DMA they would wait behind all that the other lane sends to the device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "copy/cuda_job.hpp"
#include "copy/cuda_lane_device.hpp"
#include "copy/cuda_parts.hpp"

namespace kvo {

// For the lane's thread, and a device that is open.
class CudaIssue {
public:
    // Both outlive it.
    CudaIssue(const CudaGround& ground, const CudaLaneDevice& device)
        : ground_(ground), api_(ground.api), device_(device), has_batches_(api_.cuMemcpyBatchAsync != nullptr) {}

    // `function` is the call that the status is of.
    CudaStatus issue(const CudaJob& job, const CopyPart& part, const CudaPlace& place, const char*& function);
    // Between the slots and the part's bounce buffer, by this thread.
    void copy_bounced(const CudaJob& job, const CudaPlace& place) const;

    // The stream that `job`'s pages are touched on, and the one that its parts end on.
    CudaStream page_stream(const CudaJob& job) const {
        return job.uses_kernels() ? device_.kernels() : device_.transfers();
    }
    CudaStream last_stream(const CudaJob& job) const {
        const bool ends_in_kernel =
            job.way == CopyWay::mapped || (job.way == CopyWay::staged && job.plan->direction == CopyDirection::load);
        return ends_in_kernel ? device_.kernels() : device_.transfers();
    }

private:
    CudaStatus issue_transfers(CopyDirection direction, std::span<const PartEntry> entries, const char*& function);
    CudaStatus issue_one_by_one(CopyDirection direction, std::span<const PartEntry> entries, const char*& function);
    CudaStatus issue_fetch(CopyDirection direction, const std::vector<PartEntry>& entries, const CudaPlace& place,
                           const char*& function);
    CudaStatus issue_kernel(const std::vector<PartEntry>& entries, const CudaPlace& place, const char*& function);
    CudaStatus launch(CudaFunction kernel, void** parameters, const char*& function);
    void touch_host(const void* address, std::uint64_t length, bool is_written) const;

    const CudaGround& ground_;
    const CudaApi& api_;
    const CudaLaneDevice& device_;
    bool has_batches_;
};

}  // namespace kvo
