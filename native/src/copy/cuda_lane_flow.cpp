#include "copy/cuda_lane_flow.hpp"

#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "shim/cuda_api.hpp"

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

void CudaLaneFlow::begin() {
    CudaJob& job = current_.front();
    job.runs.emplace(*job.plan, ground_.pages);
    const std::uint64_t runs = job.runs->estimate_runs();
    if (device_.copy_runs() != nullptr && runs > 0) {
        std::unique_lock lock(ground_.mutex);
        const std::shared_ptr<const WayTable> ways = ground_.ways;
        lock.unlock();
        job.way = choose_way(*ways, job.plan->direction, job.runs->total_bytes() / runs, runs);
    }
    // A load's slots are what they will be; a save's are read when they have been written.
    if (job.plan->has_digests && job.plan->direction == CopyDirection::load) {
        ends_.start_digests(job);
    }
    if (job.after == nullptr) {
        return;
    }
    const CudaStatus status = api_.cuStreamWaitEvent(issue_.page_stream(job), job.after->get(), 0);
    if (status != kCudaSuccess) {
        fail_call("cuStreamWaitEvent", status);
    }
}

// The oldest plan moves its bytes from when the one before it has ended, and what it comes after is done.
void CudaLaneFlow::note_begin() {
    if (is_idle()) {
        return;
    }
    CudaJob& oldest = this->oldest();
    if (oldest.begun.time_since_epoch().count() != 0) {
        return;
    }
    if (oldest.after != nullptr) {
        const CudaStatus status = api_.cuEventQuery(oldest.after->get());
        if (status != kCudaSuccess) {
            faults_.doubt("cuEventQuery", status);
            return;
        }
        oldest.after.reset();
    }
    oldest.begun = std::chrono::steady_clock::now();
}

bool CudaLaneFlow::issue() {
    bool has_progressed = false;
    if (!current_.empty() && current_.front().issued < current_.front().runs->total_bytes()) {
        has_progressed |= issue_part();
    }
    if (!current_.empty() && current_.front().issued == current_.front().runs->total_bytes()) {
        end_issue();
        has_progressed = true;
    }
    return has_progressed;
}

bool CudaLaneFlow::issue_part() {
    CudaJob& job = current_.front();
    const CudaSettings& settings = ground_.settings;
    std::shared_ptr<const HostPieces> pieces = ground_.ranges->pieces();
    const bool is_bounced = !starts_registered(*job.runs, job.issued, *pieces);
    const std::optional<CudaPartRoom> room = parts_.find_room(job.way, is_bounced);
    if (!room) {
        return false;
    }
    const PartLimits limits{room->has_buffer() ? settings.buffer_bytes : settings.batch_bytes,
                            job.uses_kernels() ? settings.kernel_entries : settings.batch_entries};
    const CopyPart part = cut_part(*job.runs, job.issued, job.way, limits, *pieces, room->buffers());

    CudaPlace& place = parts_.begin(job, part, *room, std::move(pieces));
    if (is_bounced && job.plan->direction == CopyDirection::load) {
        issue_.copy_bounced(job, place);
    }
    const char* function = "";
    const CudaStatus status = issue_.issue(job, part, place, function);
    if (status != kCudaSuccess) {
        fail_call(function, status);
        return true;
    }
    parts_.keep_staging(place);
    job.issued = part.end;
    return true;
}

// The ticket's event follows everything: each part ends on the same stream.
void CudaLaneFlow::end_issue() {
    CudaJob& job = current_.front();
    Result<SharedEvent> done = ground_.events.take();
    if (!done.ok()) {
        fail_current(done.fault());
        return;
    }
    const CudaStatus status = api_.cuEventRecord(done.value()->get(), issue_.last_stream(job));
    if (status != kCudaSuccess) {
        fail_call("cuEventRecord", status);
        return;
    }
    job.done = std::move(done.value());
    ground_.tickets.give_to_device(job.ticket, job.done);
    running_.splice(running_.end(), current_);
}

bool CudaLaneFlow::poll() {
    note_begin();
    const bool has_retired = poll_parts();
    return poll_jobs() || has_retired;
}

bool CudaLaneFlow::poll_parts() {
    bool has_progressed = false;
    while (!parts_.is_empty()) {
        const CudaStatus status = api_.cuEventQuery(parts_.oldest().ended);
        if (status != kCudaSuccess) {
            faults_.doubt("cuEventQuery", status);
            break;
        }
        faults_.trust();
        retire();
        has_progressed = true;
    }
    return has_progressed;
}

bool CudaLaneFlow::poll_jobs() {
    bool has_progressed = false;
    while (!running_.empty() && running_.front().part_count == 0) {
        const CudaStatus status = api_.cuEventQuery(running_.front().done->get());
        if (status != kCudaSuccess) {
            faults_.doubt("cuEventQuery", status);
            break;
        }
        faults_.trust();
        ends_.end_first(running_);
        note_begin();
        has_progressed = true;
    }
    return has_progressed;
}

// The host has seen the end of the oldest part.
void CudaLaneFlow::retire() {
    const CudaPlace& place = parts_.oldest();
    const CudaJob& job = *place.job;
    if (place.bounce != nullptr && job.plan->direction == CopyDirection::save && job.status.ok()) {
        issue_.copy_bounced(job, place);
    }
    parts_.retire();
}

void CudaLaneFlow::fail_current(Status status) noexcept {
    if (current_.empty()) {
        return;
    }
    current_.front().status = std::move(status);
    running_.splice(running_.end(), current_);
    is_draining_ = true;
}

// Handles a failed call for the current plan. Unless the device is lost, only the call was refused, whatever the code.
void CudaLaneFlow::fail_call(const char* function, CudaStatus status) {
    if (is_final(status)) {
        ground_.lose(function, status);
    } else {
        fail_current({Code::failed, std::string(function) + ": " + api_.driver.describe(status)});
    }
}

bool CudaLaneFlow::poll_drain() {
    // If streams have ended, it is unknown which of their work was done: that counts as a loss of the device.
    if (faults_.query_streams(device_) != CudaLaneFaults::Streams::empty) {
        return false;
    }
    faults_.trust();
    is_draining_ = false;
    end_all();
    return true;
}

bool CudaLaneFlow::end_lost(const std::string& why) {
    if (running_.empty() || faults_.query_streams(device_) == CudaLaneFaults::Streams::running) {
        return false;
    }
    for (CudaJob& job : running_) {
        if (job.status.ok()) {
            job.status = Status(Code::failed, why);
        }
    }
    is_draining_ = false;
    end_all();
    return true;
}

void CudaLaneFlow::end_all() {
    while (!parts_.is_empty()) {
        retire();
    }
    while (!running_.empty()) {
        ends_.end_first(running_);
    }
}

}  // namespace kvo
