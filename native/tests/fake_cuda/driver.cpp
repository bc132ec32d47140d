#include "fake_cuda/driver.hpp"

#include <numeric>
#include <utility>

namespace kvo::fake {
namespace {

constexpr Actor kHosts = 0;
constexpr int kDeinitialized = 4;
constexpr std::uint64_t kSlowTurns = 1000;
constexpr int kSlowYields = 1000;

}  // namespace

Driver& Driver::instance() {
    static Driver driver;
    return driver;
}

void Driver::reset(const Settings& settings) {
    {
        const std::lock_guard lock(streams_state_.mutex);
        lose(kDeinitialized);
    }
    streams_.clear();  // each waits for its thread
    closed_streams_.clear();
    const std::lock_guard lock(streams_state_.mutex);
    events_.clear();
    hosts_.clear();
    handed_over_.clear();
    calls_of_.clear();
    check_.reset(settings.packs_allocations);
    captures_ = CaptureTable{};
    settings_ = settings;
    streams_state_.is_stalled = false;
    streams_state_.lost_status = 0;
    faults_.arm({}, settings.seed);
    ++life_;
    calls_ = 0;
    actors_ = 1;
    retained_.assign(static_cast<std::size_t>(settings.devices), 0);
    modules_ = 0;
}

HostThread& Driver::host() {
    thread_local HostThread thread;
    if (thread.life != life_) {
        thread = HostThread{};
        thread.life = life_;
        thread.actor = settings_.threads_have_clocks ? actors_++ : kHosts;
    }
    return thread;
}

Entry Driver::enter(const char* function, bool needs_context, std::unique_lock<std::mutex>& lock) {
    streams_state_.turns.fetch_add(1, std::memory_order_relaxed);
    ++calls_;
    ++calls_of_[function];
    const HostThread& thread = host();
    Entry entry;
    if (!thread.is_exempt && faults_.strike(function)) {
        const Fault fault = faults_.fault();
        switch (fault.kind) {
            case FaultKind::call_fails:
                if (fault.loses_device) {
                    lose(fault.status);
                }
                entry.status = fault.status;
                return entry;
            case FaultKind::call_is_slow:
                lock.unlock();
                wait_turns(streams_state_.turns, kSlowTurns, kSlowYields);
                lock.lock();
                break;
            case FaultKind::operation_fails:
                entry.later = fault.status;
                break;
        }
    }
    if (streams_state_.lost_status != 0) {
        entry.status = streams_state_.lost_status;
    } else if (needs_context && thread.contexts.empty()) {
        entry.status = kInvalidContext;
    } else if (captures_.refuse(function, thread.capture_mode)) {
        entry.status = kCaptureUnsupported;
        entry.is_refused = true;
    }
    return entry;
}

void Driver::lose(int status) {
    streams_state_.lost_status = status;
    streams_state_.changed.notify_all();
}

void Driver::wait_if_lost(std::unique_lock<std::mutex>& lock) {
    streams_state_.changed.wait(lock, [this] { return streams_state_.lost_status == 0 || streams_state_.moving == 0; });
}

Stream* Driver::stream(void* handle) {
    const auto at = streams_.find(handle);
    return at == streams_.end() ? nullptr : at->second.get();
}

std::shared_ptr<Event>* Driver::event(void* handle) {
    const auto at = events_.find(handle);
    return at == events_.end() ? nullptr : &at->second;
}

void* Driver::open_stream(int priority) {
    void* const handle = reinterpret_cast<void*>(++handles_ << 8);
    const Actor actor = actors_++;
    Chance chance(settings_.seed * 1000 + actor);
    streams_[handle] =
        std::make_unique<Stream>(streams_state_, check_, actor, priority, chance.next(), settings_.turns);
    return handle;
}

void* Driver::open_event(bool lets_sleep) {
    void* const handle = reinterpret_cast<void*>(++handles_ << 8);
    events_[handle] = std::make_shared<Event>();
    events_[handle]->lets_sleep = lets_sleep;
    return handle;
}

void Driver::close_stream(void* handle) {
    const auto at = streams_.find(handle);
    at->second->finish();
    closed_streams_.push_back(std::move(at->second));
    streams_.erase(at);
}

void Driver::close_event(void* handle) { events_.erase(handle); }

// Threads without a clock of their own have heard from all that have one; those know what they have seen themselves.
VectorClock Driver::known_to_host() {
    VectorClock& clock = hosts_[host().actor];
    if (host().actor == kHosts) {
        for (const auto& [actor, other] : hosts_) {
            clock.join(other);
        }
    }
    return clock;
}

Accessor Driver::accessor(Actor actor, std::uint64_t count, const std::string& what) {
    const std::string& step = host().step;
    auto name = std::make_shared<std::string>(what + " (call " + std::to_string(calls_) +
                                              (step.empty() ? "" : ", in " + step) + ")");
    return {actor, count, false, std::move(name)};
}

int Driver::submit(Stream& stream, const char* function, decltype(Operation::work) work, int failure) {
    if (stream.capture() != nullptr) {
        return stream.capture()->is_broken ? kCaptureInvalidated : 0;
    }
    const VectorClock from_host = known_to_host();
    stream.clock().join(from_host);
    if (const auto* const wait = std::get_if<WaitForEvent>(&work)) {
        stream.clock().join(wait->event->clock);
    }
    const std::uint64_t count = stream.clock().tick(stream.actor());
    if (const auto* const record = std::get_if<RecordEvent>(&work)) {
        record->event->clock = stream.clock();
    }
    const std::string what = std::string(function) + " on stream " + std::to_string(stream.actor());
    stream.submit({accessor(stream.actor(), count, what), stream.clock(), from_host, std::move(work), failure});
    return 0;
}

int Driver::record(Stream& stream, const std::shared_ptr<Event>& event) {
    event->capture = stream.capture();
    if (event->capture != nullptr) {
        return submit(stream, "cuEventRecord", RecordEvent{event, event->records});
    }
    return submit(stream, "cuEventRecord", RecordEvent{event, ++event->records});
}

int Driver::wait(Stream& stream, const std::shared_ptr<Event>& event) {
    const Capture* const waiting = stream.capture().get();
    const Capture* const awaited = event->capture.get();
    if (waiting != awaited && awaited != nullptr) {
        // A real driver would make this stream part of the capture, and run nothing of it from here on.
        check_.report("cuStreamWaitEvent on stream " + std::to_string(stream.actor()) + " for an event of a capture");
        return awaited->is_under_way ? kCaptureIsolation : kCapturedEvent;
    }
    if (waiting != awaited) {
        stream.capture()->is_broken = true;
        return kCaptureIsolation;
    }
    return submit(stream, "cuStreamWaitEvent", WaitForEvent{event, event->records});
}

void Driver::see(const VectorClock& clock) { hosts_[host().actor].join(clock); }

bool Driver::touch(std::uint64_t address, std::uint64_t length, AccessKind kind, const char* function) {
    known_to_host();
    VectorClock& clock = hosts_[host().actor];
    const std::string name = std::string(function) + ", thread " + std::to_string(host().actor);
    Accessor self = accessor(host().actor, clock.tick(host().actor), host().actor == kHosts ? function : name);
    self.is_host = true;
    return check_.check_range({address, address + length}, kind, self, clock);
}

void Driver::keep_own_clock(bool keeps) {
    if (keeps == (host().actor != kHosts)) {
        return;
    }
    const Actor actor = keeps ? actors_++ : kHosts;
    hosts_[actor].join(hosts_[host().actor]);
    host().actor = actor;
}

void Driver::hear_others() { see(hosts_[kHosts]); }

void Driver::release(std::uint64_t token) { handed_over_[token].join(known_to_host()); }

void Driver::acquire(std::uint64_t token) { see(handed_over_[token]); }

void Driver::give_back(Region& region, const char* function) {
    const AccessRange range = region.range();
    if (streams_state_.lost_status == 0) {
        touch(range.begin, region.bytes, AccessKind::release, function);
    }
    check_.history().forget(range);
    check_.memory().retire(region);
}

Live Driver::live() {
    Live live;
    const MemoryTable& memory = check_.memory();
    live.device_allocations = memory.live(MemoryKind::device);
    live.host_allocations = memory.live(MemoryKind::pinned);
    live.registrations = memory.live(MemoryKind::registered);
    live.streams = streams_.size();
    live.events = events_.size();
    live.modules = modules_;
    live.contexts = static_cast<std::uint64_t>(std::accumulate(retained_.begin(), retained_.end(), 0));
    return live;
}

std::vector<int> Driver::stream_priorities() const {
    std::vector<int> priorities;
    for (const auto& [handle, stream] : streams_) {
        priorities.push_back(stream->priority());
    }
    return priorities;
}

std::uint64_t Driver::calls_of(const std::string& function) const {
    const auto at = calls_of_.find(function);
    return at == calls_of_.end() ? 0 : at->second;
}

}  // namespace kvo::fake
