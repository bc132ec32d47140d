// Plans on their way through the device: one is handed to it part by part, those before it run, in order.
#pragma once

#include "copy/cuda_issue.hpp"
#include "copy/cuda_job.hpp"
#include "copy/cuda_lane_device.hpp"
#include "copy/cuda_parts.hpp"

namespace kvo {

// The end of a plan: its records' digests are made, and its ticket is told.
//
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

// For the lane's thread. What throws std::bad_alloc has the current plan fail.
class CudaLaneFlow {
public:
    // All outlive it.
    CudaLaneFlow(CudaGround& ground, const CudaLaneDevice& device, CudaLaneEnds& ends)
        : ground_(ground),
          api_(ground.api),
          device_(device),
          ends_(ends),
          parts_(ground.settings),
          issue_(ground, device),
          faults_(ground) {}

    // The device is open.
    void open() { parts_.open(device_.places(), device_.bounces(), device_.stagings()); }

    bool is_idle() const noexcept { return current_.empty() && running_.empty(); }
    bool has_current() const noexcept { return !current_.empty(); }
    // Nothing is handed out until both streams are empty.
    bool is_draining() const noexcept { return is_draining_; }
    // Whether the device has given no sensible answer of late.
    bool is_doubting() const noexcept { return faults_.is_doubting(); }
    // It moves bytes, or will do so first. There is one.
    CudaJob& oldest() { return running_.empty() ? current_.front() : running_.front(); }

    // The list's one job becomes the current one, which there is none of; `begin` says how it goes.
    void take(CudaJobs job) noexcept { current_.splice(current_.end(), job); }
    void begin();
    // Hands out a part of the current job, or what follows its last.
    bool issue();
    // Looks for parts and plans that have ended.
    bool poll();

    // Fails the current plan. Its ticket ends only after all work that the device has of it has ended.
    void fail_current(Status status) noexcept;
    bool poll_drain();
    // The device is lost. True: all that ran has ended; nothing ends while a copy may still write.
    bool end_lost(const std::string& why);

private:
    void note_begin();
    bool issue_part();
    void end_issue();
    bool poll_parts();
    bool poll_jobs();
    void retire();
    void end_all();
    void fail_call(const char* function, CudaStatus status);

    CudaGround& ground_;
    const CudaApi& api_;
    const CudaLaneDevice& device_;
    CudaLaneEnds& ends_;
    CudaParts parts_;
    CudaIssue issue_;
    CudaLaneFaults faults_;
    CudaJobs current_;  // one or none: being handed to the device
    CudaJobs running_;  // all of it with the device, in order
    bool is_draining_ = false;
};

}  // namespace kvo
