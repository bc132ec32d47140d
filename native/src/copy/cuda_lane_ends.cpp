#include "copy/cuda_lane_ends.hpp"

#include <chrono>
#include <memory>
#include <new>
#include <utility>

namespace kvo {

void CudaLaneEnds::start_digests(CudaJob& job) {
    auto work = std::make_shared<DigestWork>(job.plan, ground_.pages);
    ground_.digests->submit(work);
    job.digests = std::move(work);
}

void CudaLaneEnds::end_first(CudaJobs& running) {
    CudaJob& job = running.front();
    if (job.begun.time_since_epoch().count() != 0) {
        job.copied = std::chrono::steady_clock::now() - job.begun;
    }
    if (job.status.ok() && job.plan->has_digests && job.digests == nullptr) {
        try {
            start_digests(job);
        } catch (const std::bad_alloc&) {
            job.status = Status(Code::failed, "no memory");
        }
    }
    if (job.digests == nullptr) {
        tell(job);
        running.pop_front();
        return;
    }
    if (!job.status.ok()) {
        job.digests->cancel();
    }
    digesting_.splice(digesting_.end(), running, running.begin());
}

bool CudaLaneEnds::poll() {
    bool has_progressed = false;
    for (auto next = digesting_.begin(); next != digesting_.end();) {
        const auto job = next++;
        if (job->digests->is_done()) {
            tell(*job);
            digesting_.erase(job);
            has_progressed = true;
        }
    }
    return has_progressed;
}

void CudaLaneEnds::tell(CudaJob& job) noexcept {
    const bool has_digests = job.status.ok() && job.digests != nullptr;
    ground_.order.end(job.ticket);
    ground_.tickets.finish(job.ticket, std::move(job.status),
                           has_digests ? job.digests->take() : std::vector<RunDigest>(), job.copied);
    ground_.wake_lanes();
}

}  // namespace kvo
