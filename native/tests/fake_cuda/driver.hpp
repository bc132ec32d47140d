// The state behind the entry points: devices, contexts, streams, events, and what each host thread has seen.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fake_cuda/access_check.hpp"
#include "fake_cuda/capture.hpp"
#include "fake_cuda/fake_control.hpp"
#include "fake_cuda/fault_plan.hpp"
#include "fake_cuda/stream.hpp"

namespace kvo::fake {

// The driver's state of one thread. State of an earlier life of the driver does not count.
struct HostThread {
    std::uint64_t life = 0;
    std::vector<int> contexts;  // a stack of devices' ordinals; the last one is current
    CaptureMode capture_mode = CaptureMode::global;
    bool is_exempt = false;
    Actor actor = 0;
    std::string step;
};

// How a call begins.
struct Entry {
    int status = 0;           // what it has to fail with, or 0
    bool is_refused = false;  // nor does it give back what it was to give back
    int later = 0;            // what the operation that it asks for has to fail with, or 0
};

class Driver {
public:
    // The one there is, as there is one driver in a process.
    static Driver& instance();
    ~Driver() { reset({}); }

    void reset(const Settings& settings);
    HostThread& host();  // the calling thread
    // Counts a call and takes its turn; a slow one without the lock.
    Entry enter(const char* function, bool needs_context, std::unique_lock<std::mutex>& lock);
    void lose(int status);
    // Waits until the device has stopped, because a caller that hears of the loss may free memory that the device
    // touches.
    void wait_if_lost(std::unique_lock<std::mutex>& lock);

    // Handles are numbers that are not used twice. Null: not one of ours any more.
    Stream* stream(void* handle);
    std::shared_ptr<Event>* event(void* handle);
    void* open_stream(int priority);
    void* open_event(bool lets_sleep);
    void close_stream(void* handle);
    void close_event(void* handle);

    // Calls of the calling thread that submit work or see results. They return 0, or the status of a stream that takes
    // nothing. `function` is named in reports.
    int submit(Stream& stream, const char* function, decltype(Operation::work) work, int failure = 0);
    int record(Stream& stream, const std::shared_ptr<Event>& event);
    int wait(Stream& stream, const std::shared_ptr<Event>& event);
    void see(const VectorClock& clock);
    bool touch(std::uint64_t address, std::uint64_t length, AccessKind kind, const char* function);
    void keep_own_clock(bool keeps);
    void hear_others();
    void release(std::uint64_t token);
    void acquire(std::uint64_t token);
    // Retires the region. An operation that still uses it is reported.
    void give_back(Region& region, const char* function);

    const Settings& settings() const { return settings_; }
    StreamState& streams() { return streams_state_; }
    AccessCheck& check() { return check_; }
    const AccessCheck& check() const { return check_; }
    FaultPlan& faults() { return faults_; }
    CaptureTable& captures() { return captures_; }
    Live live();
    std::vector<int> stream_priorities() const;
    std::uint64_t calls_of(const std::string& function) const;
    std::vector<int>& retained() { return retained_; }
    const std::vector<int>& retained() const { return retained_; }
    std::uint64_t& modules() { return modules_; }

private:
    Driver() = default;

    VectorClock known_to_host();
    Accessor accessor(Actor actor, std::uint64_t count, const std::string& what);

    Settings settings_;
    StreamState streams_state_;
    AccessCheck check_;
    FaultPlan faults_;
    CaptureTable captures_;
    std::uint64_t life_ = 1;
    std::uint64_t calls_ = 0;
    std::map<std::string, std::uint64_t> calls_of_;
    std::uintptr_t handles_ = 0;
    Actor actors_ = 1;                                  // 0 is the host, as far as its threads count as one
    std::map<Actor, VectorClock> hosts_;                // of threads with clocks of their own, and of 0
    std::map<std::uint64_t, VectorClock> handed_over_;  // by token
    std::map<void*, std::unique_ptr<Stream>> streams_;
    std::vector<std::unique_ptr<Stream>> closed_streams_;  // may still carry out what they have
    std::map<void*, std::shared_ptr<Event>> events_;
    std::vector<int> retained_;  // by device
    std::uint64_t modules_ = 0;
};

}  // namespace kvo::fake
