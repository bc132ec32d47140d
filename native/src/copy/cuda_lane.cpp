#include "copy/cuda_lane.hpp"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

namespace kvo {

CudaLane::~CudaLane() {
    if (thread_.joinable()) {
        thread_.join();
    }
}

Status CudaLane::open() {
    std::promise<Status> opened;
    std::future<Status> answer = opened.get_future();
    try {
        thread_ = std::thread([this, promise = std::move(opened)]() mutable { run(std::move(promise)); });
    } catch (const std::system_error& fault) {
        return {Code::failed, std::string("no thread for copies can be started: ") + fault.what()};
    }
    return answer.get();
}

void CudaLane::submit(Jobs job) noexcept {
    const std::lock_guard lock(mutex_);
    queue_.splice(queue_.end(), job);
    is_woken_ = true;
    changed_.notify_all();
}

void CudaLane::wake() noexcept {
    const std::lock_guard lock(mutex_);
    is_woken_ = true;
    changed_.notify_all();
}

void CudaGround::wake_lanes() noexcept {
    for (CudaLane* const lane : lanes) {
        lane->wake();
    }
}

void CudaLane::begin_close() {
    const std::lock_guard lock(mutex_);
    is_closing_ = is_woken_ = true;
    changed_.notify_all();
}

bool CudaLane::wait_closed(int timeout_ms) {
    std::unique_lock lock(mutex_);
    const bool is_closed =
        changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return is_closed_; });
    is_aborting_ = !is_closed;
    is_woken_ = true;
    changed_.notify_all();
    return is_closed;
}

void CudaLane::run(std::promise<Status> opened) {
    pthread_setname_np(pthread_self(), "kvoffload-gpu");
    Status status;
    try {
        status = open_device();
    } catch (const std::bad_alloc&) {
        status = Status(Code::failed, "no memory");
    }
    if (!status.ok()) {
        close_device();
        opened.set_value(std::move(status));
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = false;
    }
    opened.set_value({});
    for (;;) {
        {
            const std::lock_guard lock(mutex_);
            is_woken_ = false;
        }
        const bool has_progressed = step();
        const bool sleeps = !has_progressed && may_sleep();
        std::unique_lock lock(mutex_);
        if (is_idle() && queue_.empty()) {
            if (is_closing_) {
                break;
            }
            changed_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
        } else if (!has_progressed) {
            const std::chrono::microseconds longest =
                sleeps ? ground_.settings.longest_sleep : ground_.settings.poll_interval;
            changed_.wait_for(lock, longest, [this] { return is_woken_; });
        }
    }
    close_device();
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
}

// Whatever allocates on the way fails the current plan and no other.
bool CudaLane::step() {
    try {
        poll_close();
        return work();
    } catch (const std::bad_alloc&) {
        fail_current({Code::failed, "no memory"});
        return false;
    }
}

// Nothing is to be done before somebody wakes the lane: the watch, who ends a plan or loses the device, who submits or
// closes.
bool CudaLane::may_sleep() {
    if (is_draining_ || strange_ || ground_.is_lost.load() || !digesting_.empty()) {
        return false;
    }
    if (is_idle()) {
        return true;  // what is queued may not begin before a plan of the other lane has ended
    }
    CudaJob& first = running_.empty() ? current_.front() : running_.front();
    if (first.after != nullptr && watch_->has_seen(first.after)) {
        first.after.reset();
    }
    return first.after != nullptr;
}

bool CudaLane::work() {
    bool has_progressed = poll_digests();
    if (ground_.is_lost.load()) {
        return poll_loss() || has_progressed;
    }
    if (is_draining_) {
        return poll_drain() || has_progressed;
    }
    note_begin();
    has_progressed |= poll_parts();
    has_progressed |= poll_jobs();
    if (current_.empty() && !take_job()) {
        return has_progressed;
    }
    if (!current_.empty() && current_.front().issued < current_.front().runs->total_bytes()) {
        has_progressed |= issue_part();
    }
    if (!current_.empty() && current_.front().issued == current_.front().runs->total_bytes()) {
        end_issue();
        has_progressed = true;
    }
    return has_progressed;
}

bool CudaLane::take_job() {
    CopyTicket ticket = 0;
    {
        const std::lock_guard lock(mutex_);
        if (queue_.empty()) {
            return false;
        }
        ticket = queue_.front().ticket;
    }
    // Nobody else takes from the queue, and nobody waits at the lock while plans are compared.
    bool is_known = true;
    try {
        if (!ground_.order.may_begin(ticket, ground_.pages)) {
            return false;
        }
    } catch (const std::bad_alloc&) {
        is_known = false;
    }
    {
        const std::lock_guard lock(mutex_);
        current_.splice(current_.end(), queue_, queue_.begin());
    }
    if (is_known) {
        begin_job();
    } else {
        fail_current({Code::failed, "no memory"});
    }
    return true;
}

void CudaLane::begin_job() {
    CudaJob& job = current_.front();
    job.runs.emplace(*job.plan, ground_.pages);
    const std::uint64_t runs = job.runs->estimate_runs();
    if (copy_runs_ != nullptr && runs > 0) {
        std::unique_lock lock(ground_.mutex);
        const std::shared_ptr<const WayTable> ways = ground_.ways;
        lock.unlock();
        job.way = choose_way(*ways, job.plan->direction, job.runs->total_bytes() / runs, runs);
    }
    // A load's slots are what they will be; a save's are read when they have been written.
    if (job.plan->has_digests && job.plan->direction == CopyDirection::load) {
        start_digests(job);
    }
    if (job.after == nullptr) {
        return;
    }
    const CudaStatus status = api_.cuStreamWaitEvent(page_stream(job), job.after->get(), 0);
    if (status != kCudaSuccess) {
        fail_call("cuStreamWaitEvent", status);
    }
}

// The oldest plan moves its bytes from when the one before it has ended, and what it comes after is done.
void CudaLane::note_begin() {
    if (running_.empty() && current_.empty()) {
        return;
    }
    CudaJob& oldest = running_.empty() ? current_.front() : running_.front();
    if (oldest.begun.time_since_epoch().count() != 0) {
        return;
    }
    if (oldest.after != nullptr) {
        const CudaStatus status = api_.cuEventQuery(oldest.after->get());
        if (status != kCudaSuccess) {
            doubt("cuEventQuery", status);
            return;
        }
        oldest.after.reset();
    }
    oldest.begun = std::chrono::steady_clock::now();
}

bool CudaLane::issue_part() {
    CudaJob& job = current_.front();
    const CudaSettings& settings = ground_.settings;
    const std::shared_ptr<const HostPieces> pieces = ground_.ranges->pieces();
    const bool is_bounced = !starts_registered(*job.runs, job.issued, *pieces);
    const auto bounce = std::ranges::find(bounces_, true, &Bounce::is_free);
    const std::optional<std::uint64_t> lists =
        uses_kernels(job) ? lists_.find_room(settings.kernel_entries * kListEntryBytes) : lists_.head;
    const bool is_queue_full =
        queued_transfers_ > 0 && queued_transfers_ + settings.batch_entries > settings.queued_transfers;
    if (place_count_ == places_.size() || is_queue_full || !lists || (is_bounced && bounce == bounces_.end())) {
        return false;
    }
    Staging* const staging = job.way == CopyWay::staged ? &stagings_[next_staging_] : nullptr;
    PartBuffers buffers;
    buffers.staging = staging == nullptr ? 0 : staging->address;
    if (is_bounced) {
        buffers.bounce = reinterpret_cast<CudaAddress>(bounce->host);
        buffers.bounce_mapped = bounce->mapped;
    }
    const bool has_buffer = is_bounced || staging != nullptr;
    const PartLimits limits{has_buffer ? settings.buffer_bytes : settings.batch_bytes,
                            uses_kernels(job) ? settings.kernel_entries : settings.batch_entries};
    const CopyPart part = cut_part(*job.runs, job.issued, job.way, limits, *pieces, buffers);

    Place& place = places_[(first_place_ + place_count_) % places_.size()];
    place.job = &job;
    place.bounce = is_bounced ? &*bounce : nullptr;
    place.begin = part.begin;
    place.end = part.end;
    place.lists_begin = *lists;
    lists_.head = *lists + part.kernel.size() * kListEntryBytes;
    place.lists_end = lists_.head;
    place.transfers = part.transfers.size();
    place.pieces = pieces;
    queued_transfers_ += place.transfers;
    ++place_count_;
    ++job.part_count;
    if (is_bounced) {
        bounce->is_free = false;
        if (job.plan->direction == CopyDirection::load) {
            copy_bounced(job, place);
        }
    }
    const char* function = "";
    const CudaStatus status = issue(job, part, place, staging, function);
    if (status != kCudaSuccess) {
        fail_call(function, status);
        return true;
    }
    if (staging != nullptr) {
        staging->last = &place;
        next_staging_ = (next_staging_ + 1) % stagings_.size();
    }
    job.issued = part.end;
    return true;
}

// The ticket's event follows everything: each part ends on the same stream.
void CudaLane::end_issue() {
    CudaJob& job = current_.front();
    Result<SharedEvent> done = ground_.events.take();
    if (!done.ok()) {
        fail_current(done.fault());
        return;
    }
    const CudaStatus status = api_.cuEventRecord(done.value()->get(), last_stream(job));
    if (status != kCudaSuccess) {
        fail_call("cuEventRecord", status);
        return;
    }
    job.done = std::move(done.value());
    ground_.tickets.give_to_device(job.ticket, job.done);
    running_.splice(running_.end(), current_);
}

bool CudaLane::poll_parts() {
    bool has_progressed = false;
    while (place_count_ > 0) {
        const CudaStatus status = api_.cuEventQuery(places_[first_place_].ended);
        if (status != kCudaSuccess) {
            doubt("cuEventQuery", status);
            break;
        }
        strange_.reset();
        retire(places_[first_place_]);
        has_progressed = true;
    }
    return has_progressed;
}

bool CudaLane::poll_jobs() {
    bool has_progressed = false;
    while (!running_.empty() && running_.front().part_count == 0) {
        const CudaStatus status = api_.cuEventQuery(running_.front().done->get());
        if (status != kCudaSuccess) {
            doubt("cuEventQuery", status);
            break;
        }
        strange_.reset();
        end_first();
        note_begin();
        has_progressed = true;
    }
    return has_progressed;
}

bool CudaLane::poll_digests() {
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

// The host has seen the end of the longest on the device.
void CudaLane::retire(Place& place) {
    CudaJob& job = *std::exchange(place.job, nullptr);
    --job.part_count;
    if (place.bounce != nullptr) {
        if (job.plan->direction == CopyDirection::save && job.status.ok()) {
            copy_bounced(job, place);
        }
        place.bounce->is_free = true;
    }
    place.pieces.reset();
    lists_.tail = place.lists_end;
    queued_transfers_ -= place.transfers;
    for (Staging& staging : stagings_) {
        staging.last = staging.last == &place ? nullptr : staging.last;
    }
    first_place_ = (first_place_ + 1) % places_.size();
    --place_count_;
}

void CudaLane::start_digests(CudaJob& job) {
    auto work = std::make_shared<DigestWork>(job.plan, ground_.pages);
    ground_.digests->submit(work);
    job.digests = std::move(work);
}

// The first that runs has moved all it will.
void CudaLane::end_first() {
    CudaJob& job = running_.front();
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
        running_.pop_front();
        return;
    }
    if (!job.status.ok()) {
        job.digests->cancel();
    }
    digesting_.splice(digesting_.end(), running_, running_.begin());
}

void CudaLane::tell(CudaJob& job) noexcept {
    const bool has_digests = job.status.ok() && job.digests != nullptr;
    ground_.order.end(job.ticket);
    ground_.tickets.finish(job.ticket, std::move(job.status),
                           has_digests ? job.digests->take() : std::vector<RunDigest>(), job.copied);
    ground_.wake_lanes();
}

}  // namespace kvo
