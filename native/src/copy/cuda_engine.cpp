#include "copy/cuda_engine.hpp"

#include <algorithm>
#include <list>
#include <new>
#include <thread>
#include <utility>

namespace kvo {
namespace {

constexpr int kLastWaitMs = 5000;
constexpr std::size_t kFirstEvents = 64;

// The engine's context is current on this thread for as long as this lives.
class CurrentContext {
public:
    CurrentContext(const CudaApi& api, CudaContext context) : api_(api), status_(api.cuCtxPushCurrent(context)) {}
    ~CurrentContext() {
        CudaContext popped = nullptr;
        if (status_ == kCudaSuccess) {
            api_.cuCtxPopCurrent(&popped);
        }
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

    Status check() const {
        return status_ == kCudaSuccess ? Status()
                                       : Status(Code::failed, "cuCtxPushCurrent: " + api_.driver.describe(status_));
    }

private:
    const CudaApi& api_;
    CudaStatus status_;
};

Status forked() {
    return {Code::unavailable, "the copy engine belongs to the process that made it, and this is a child of it"};
}

unsigned choose_digest_threads(unsigned wanted) {
    return wanted > 0 ? wanted : std::clamp(std::thread::hardware_concurrency() / 4, 1u, 4u);
}

CudaStream stream_of(ComputeStream stream) { return reinterpret_cast<CudaStream>(stream); }

}  // namespace

// A caller who may use the driver until this ends: a close waits for it, and admits no further callers.
class CudaEngine::Visit {
public:
    explicit Visit(CudaEngine& engine) : engine_(engine) {
        const std::lock_guard lock(engine_.visit_mutex_);
        is_let_in_ = !engine_.is_closing_;
        engine_.visitors_ += is_let_in_ ? 1 : 0;
    }
    ~Visit() {
        if (is_let_in_) {
            const std::lock_guard lock(engine_.visit_mutex_);
            --engine_.visitors_;
            engine_.visits_changed_.notify_all();
        }
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

    bool is_let_in() const { return is_let_in_; }

private:
    CudaEngine& engine_;
    bool is_let_in_ = false;
};

Result<std::unique_ptr<CudaEngine>> CudaEngine::open(const CudaApi& api, const CudaSettings& settings,
                                                     PageTable pages) {
    if (Status status = check_settings(settings); !status.ok()) {
        return status;
    }
    if (Status status = check_pages(pages); !status.ok()) {
        return status;
    }
    auto ground = std::make_unique<CudaGround>(api, settings, std::move(pages));
    std::unique_ptr<CudaEngine> engine(new CudaEngine(std::move(ground)));
    if (Status status = engine->start(); !status.ok()) {
        return status;
    }
    return engine;
}

CudaEngine::CudaEngine(std::unique_ptr<CudaGround> ground)
    : ground_(std::move(ground)),
      save_(std::make_unique<CudaLane>(*ground_)),
      load_(std::make_unique<CudaLane>(*ground_)) {
    ground_->lanes = {&save_->queue(), &load_->queue()};
}

CudaEngine::~CudaEngine() {
    bool is_over = false;
    try {
        is_over = is_of_this_process() && close(kLastWaitMs).ok();
    } catch (const std::bad_alloc&) {
        is_over = false;
    }
    if (!is_over) {
        // Freeing anything now could be under a copy; and in a child there are no threads to join.
        static_cast<void>(save_.release());
        static_cast<void>(load_.release());
        static_cast<void>(ground_.release());
    }
}

Status CudaEngine::start() {
    const CudaApi& api = ground_->api;
    CudaDeviceId device = 0;
    const char* function = "cuInit";
    CudaStatus status = api.driver.cuInit(0);
    if (status == kCudaSuccess) {
        function = "cuDeviceGet";
        status = api.driver.cuDeviceGet(&device, ground_->settings.device);
    }
    int multiprocessors = 0;
    if (status == kCudaSuccess) {
        function = "cuDeviceGetAttribute";
        status = api.driver.cuDeviceGetAttribute(&multiprocessors, kCudaMultiprocessorCount, device);
    }
    if (status == kCudaSuccess) {
        function = "cuDevicePrimaryCtxRetain";
        status = api.cuDevicePrimaryCtxRetain(&ground_->context, device);
    }
    if (status != kCudaSuccess) {
        is_closed_ = true;
        return {Code::failed, std::string(function) + ": " + api.driver.describe(status)};
    }
    ground_->device = device;
    ground_->kernel_blocks = choose_kernel_blocks(multiprocessors, ground_->settings.kernel_blocks);
    return open_parts();
}

Status CudaEngine::open_parts() {
    const CudaSettings& settings = ground_->settings;
    Result<std::unique_ptr<CudaRanges>> ranges =
        CudaRanges::start(ground_->api, ground_->context, settings.piece_bytes);
    if (!ranges.ok()) {
        return ranges.fault();
    }
    ground_->ranges = std::move(ranges.value());
    Result<std::unique_ptr<RecordDigests>> digests =
        RecordDigests::start(choose_digest_threads(settings.digest_threads), settings.on_host_access);
    if (!digests.ok()) {
        return digests.fault();
    }
    ground_->digests = std::move(digests.value());
    Status opened = save_->open();
    if (opened.ok()) {
        opened = load_->open();
    }
    if (opened.ok()) {
        const CurrentContext current(ground_->api, ground_->context);
        opened = current.check();
        opened = opened.ok() ? ground_->events.fill(std::min(kFirstEvents, 2 * settings.limits.plans)) : opened;
    }
    return opened;
}

Status CudaEngine::add_host_range(std::uint64_t begin, std::uint64_t length) {
    if (!is_of_this_process()) {
        return forked();
    }
    const Visit visit(*this);
    return visit.is_let_in() ? ground_->ranges->add(begin, length)
                             : Status(Code::unavailable, "the copy engine is closed");
}

Status CudaEngine::remove_host_range(std::uint64_t begin, std::uint64_t length) {
    if (!is_of_this_process()) {
        return forked();
    }
    const Visit visit(*this);
    return visit.is_let_in() ? ground_->ranges->remove(begin, length)
                             : Status(Code::unavailable, "the copy engine is closed");
}

void CudaEngine::wait_registered(std::uint64_t bytes, int timeout_ms) {
    if (is_of_this_process()) {
        ground_->ranges->wait_for(bytes, timeout_ms);
    }
}

RegistrationProgress CudaEngine::registration() const {
    return is_of_this_process() ? ground_->ranges->progress() : RegistrationProgress();
}

void CudaEngine::set_ways(WayTable ways) {
    auto shared = std::make_shared<const WayTable>(std::move(ways));
    if (is_of_this_process()) {
        const std::lock_guard lock(ground_->mutex);
        ground_->ways.swap(shared);
    }
}

std::string CudaEngine::kernel_problem() const {
    if (!is_of_this_process()) {
        return {};
    }
    const std::lock_guard lock(ground_->mutex);
    return ground_->kernel_problem;
}

Status CudaEngine::check_stream(ComputeStream stream) const {
    int capture = kCudaCaptureNone;
    const CudaStatus status = ground_->api.cuStreamIsCapturing(stream_of(stream), &capture);
    if (status != kCudaSuccess) {
        return {Code::failed, "cuStreamIsCapturing: " + ground_->api.driver.describe(status)};
    }
    if (capture != kCudaCaptureNone) {
        return {Code::failed, "the compute stream is being captured: what it is given does not run now"};
    }
    return {};
}

Result<SharedEvent> CudaEngine::record(ComputeStream stream) {
    const CurrentContext current(ground_->api, ground_->context);
    Status status = current.check();
    if (status.ok()) {
        status = check_stream(stream);
    }
    if (!status.ok()) {
        return status;
    }
    Result<SharedEvent> event = ground_->events.take();
    if (event.ok()) {
        const CudaStatus recorded = ground_->api.cuEventRecord(event.value()->get(), stream_of(stream));
        if (recorded != kCudaSuccess) {
            return Status(Code::failed, "cuEventRecord: " + ground_->api.driver.describe(recorded));
        }
    }
    return event;
}

Result<SharedEvent> CudaEngine::mark(ComputeStream stream) {
    if (!is_of_this_process()) {
        return forked();
    }
    const Visit visit(*this);
    return visit.is_let_in() ? record(stream)
                             : Result<SharedEvent>(Status(Code::unavailable, "the copy engine is closed"));
}

Result<CopyTicket> CudaEngine::submit(CopyPlan plan, std::optional<ComputeStream> after) {
    return take(std::move(plan), nullptr, after);
}

Result<CopyTicket> CudaEngine::submit_after(CopyPlan plan, SharedEvent point) {
    if (is_of_this_process() && point != nullptr && !point->is_of(ground_->events)) {
        return Status(Code::invalid, "the point was marked by another copy engine");
    }
    return take(std::move(plan), std::move(point), {});
}

Result<CopyTicket> CudaEngine::take(CopyPlan plan, SharedEvent point, std::optional<ComputeStream> stream) {
    if (!is_of_this_process()) {
        return forked();
    }
    if (Status status = check_plan(plan, ground_->pages, ground_->shared_blocks); !status.ok()) {
        return status;
    }
    const Visit visit(*this);
    if (!visit.is_let_in()) {
        return Status(Code::unavailable, "the copy engine is closed");
    }
    if (is_lost()) {
        const std::lock_guard lock(ground_->mutex);
        return Status(Code::unavailable, ground_->loss.empty() ? "the device is lost" : ground_->loss);
    }
    const CopyDirection direction = plan.direction;
    // All memory is allocated before there is a ticket, or the ticket is given back.
    std::list<CudaJob> job(1);
    job.front().plan = std::make_shared<const CopyPlan>(std::move(plan));
    if (stream) {
        Result<SharedEvent> marked = record(*stream);
        if (!marked.ok()) {
            return marked.fault();
        }
        point = std::move(marked.value());
    }
    job.front().after = std::move(point);
    const std::lock_guard lock(submit_mutex_);
    const Result<CopyTicket> ticket = ground_->tickets.open();
    if (!ticket.ok()) {
        return ticket;
    }
    job.front().ticket = ticket.value();
    try {
        ground_->order.add(ticket.value(), job.front().plan);
    } catch (const std::bad_alloc&) {
        ground_->tickets.forget(ticket.value());
        throw;
    }
    lane(direction).queue().submit(std::move(job));
    return ticket;
}

std::vector<FinishedCopy> CudaEngine::poll() {
    return is_of_this_process() ? ground_->tickets.take_finished() : std::vector<FinishedCopy>();
}

bool CudaEngine::fence(int timeout_ms) {
    return is_of_this_process() && ground_->tickets.wait_until_finished(timeout_ms);
}

Status CudaEngine::make_wait(ComputeStream stream, CopyTicket ticket, int timeout_ms) {
    if (!is_of_this_process()) {
        return forked();
    }
    const Visit visit(*this);
    if (!visit.is_let_in()) {
        return {Code::unavailable, "the copy engine is closed"};
    }
    const Result<SharedEvent> done = ground_->tickets.wait_for_event(ticket, timeout_ms);
    if (!done.ok() || done.value() == nullptr) {
        return done.ok() ? Status() : done.fault();
    }
    const CurrentContext current(ground_->api, ground_->context);
    Status status = current.check();
    if (status.ok()) {
        status = check_stream(stream);
    }
    if (!status.ok()) {
        return status;
    }
    const CudaStatus waits = ground_->api.cuStreamWaitEvent(stream_of(stream), done.value()->get(), 0);
    return waits == kCudaSuccess ? Status()
                                 : Status(Code::failed, "cuStreamWaitEvent: " + ground_->api.driver.describe(waits));
}

Status CudaEngine::close(int timeout_ms) {
    if (!is_of_this_process()) {
        return {};
    }
    const Deadline deadline(timeout_ms);
    std::unique_lock lock(visit_mutex_);
    is_closing_ = true;
    const auto is_my_turn = [this] { return !is_somebody_closing_ && visitors_ == 0; };
    if (!visits_changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_my_turn)) {
        return {Code::failed, "another thread is still in the copy engine"};
    }
    if (is_closed_) {
        return {};
    }
    is_somebody_closing_ = true;
    lock.unlock();
    Status status = close_parts(deadline);
    lock.lock();
    is_somebody_closing_ = false;
    is_closed_ = status.ok();
    visits_changed_.notify_all();
    return status;
}

Status CudaEngine::close_parts(const Deadline& deadline) {
    save_->queue().begin_close();
    load_->queue().begin_close();
    const bool is_save_closed = save_->queue().wait_closed(deadline.left_ms());
    const bool is_load_closed = load_->queue().wait_closed(deadline.left_ms());
    if (!is_save_closed || !is_load_closed) {
        return {Code::failed, "copies still run; the memory of every plan that was not polled must stay"};
    }
    if (ground_->ranges != nullptr && !ground_->ranges->close(deadline.left_ms())) {
        return {Code::failed, "memory is still being unregistered; it must stay"};
    }
    {
        const CurrentContext current(ground_->api, ground_->context);
        ground_->tickets.release_events();
        ground_->events.destroy();
    }
    ground_->api.cuDevicePrimaryCtxRelease(ground_->device);
    return {};
}

}  // namespace kvo
