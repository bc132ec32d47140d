// The end of a plan: its records' digests are made, and its ticket is told.
#pragma once

#include "copy/cuda_ground.hpp"
#include "copy/cuda_job.hpp"

namespace kvo {

// For the lane's thread.
class CudaLaneEnds {
public:
    explicit CudaLaneEnds(CudaGround& ground) : ground_(ground) {}

    void start_digests(CudaJob& job);
    // The first of these has moved all it will. It is told, now or when its digests are there.
    void end_first(CudaJobs& running);
    // Finishes the jobs whose digests are there; returns whether there were any.
    bool poll();
    void tell(CudaJob& job) noexcept;
    bool is_idle() const noexcept { return digesting_.empty(); }

private:
    CudaGround& ground_;
    CudaJobs digesting_;  // moved, and their records still being read
};

}  // namespace kvo
