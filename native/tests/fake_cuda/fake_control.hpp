// Control of the driver made for tests: a test chooses the driver's habits, breaks it, and tells it what it cannot see.
// The library is opened through the shim as libcuda would be; this interface is its one other door.
//
// Streams run on threads of their own, with seeded delays. Every operation says which bytes it reads and writes; two
// that touch the same byte, one of them writing, without an order between them end the process with a line that names
// both. An order comes from a stream, from an event that a stream waits for, from a host thread that has seen an event
// or a stream finished, and from hand-overs between host threads. Device memory cannot be touched by the host at all:
// its addresses are mapped nowhere.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shim/dynamic_library.hpp"

namespace kvo::fake {

// Error codes of the driver's interface that tests name.
inline constexpr int kInvalidValue = 1;
inline constexpr int kOutOfMemory = 2;
inline constexpr int kInvalidContext = 201;
inline constexpr int kInvalidHandle = 400;
inline constexpr int kNotFound = 500;
inline constexpr int kNotReady = 600;
inline constexpr int kIllegalAddress = 700;
inline constexpr int kAlreadyRegistered = 712;
inline constexpr int kNotRegistered = 713;
inline constexpr int kLaunchFailed = 719;
inline constexpr int kNotSupported = 801;
inline constexpr int kCaptureUnsupported = 900;
inline constexpr int kCaptureInvalidated = 901;
inline constexpr int kCaptureIsolation = 905;
inline constexpr int kCapturedEvent = 907;

struct Settings {
    std::uint64_t seed = 1;
    int devices = 1;
    std::uint64_t device_bytes = std::uint64_t{64} << 20;
    int version = 13000;
    std::vector<std::string> missing;  // functions that this driver does not have
    int turns = 64;                    // the longest delay before an operation and inside it, in calls to the driver
    // Device allocations in a row touch where their sizes are multiples of 256, as on a real device.
    bool packs_allocations = false;
    // Every host thread has a clock of its own, and knows what it did, what it saw of events and streams, and what it
    // acquired; else all count as one, but for those that keep_own_clock.
    bool threads_have_clocks = false;
    int patience_ms = 60000;  // a call that waits for longer waits for what will not come, and is reported
};

// Guarantees of a real driver about its errors, as far as we know, which this driver keeps:
//
// * A code that a call gives for itself (1, 2, 201, 400, 801, 900 to 908 and most others) says nothing about the work
//   that streams have. It goes on, and memory that it touches stays in use until an event or a stream tells otherwise.
// * A sticky code is of an operation that failed while it ran. It leaves the context lost: CUDA documents that every
//   later call gives the same code. Which call gives it first is left open, and so is how much the failed operation and
//   those under way in other streams had moved. No event comes any more.
// * That nothing moves any more once a call has given a sticky code is nowhere promised in so many words. It has to be
//   relied on all the same: no later call could ever tell when memory that the device may touch is free again. So a
//   call here gives the code when everything that was under way has stopped, and what had not begun never runs.
constexpr bool is_sticky(int status) {
    return status == 214 || status == 220 || status == 226 || status == kIllegalAddress || status == 702 ||
           status == 710 || (status >= 714 && status <= kLaunchFailed) || status == 721;
}

enum class FaultKind : std::uint8_t {
    call_fails,       // with `status`; one that gives something back does so all the same, and reports what was before
    call_is_slow,     // it returns after many turns of others, and does what it has to
    operation_fails,  // a copy or kernel fails when it runs, partly done, and the context is lost: `status` is sticky
};

// A fault that is planted in calls. Operations are counted by the calls that ask for them: "cuMemcpyAsync",
// "cuMemcpyBatchAsync" and "cuLaunchKernel".
struct Fault {
    std::uint64_t call = 0;  // counted from 1 since arm_fault; 0: by chance alone
    int per_mille = 0;       // every call, with this chance
    int status = kInvalidValue;
    bool loses_device = false;  // of a call that fails: from then on every call does, and no operation begins any more
    FaultKind kind = FaultKind::call_fails;
    std::string function = {};  // counts and strikes calls of this one alone; empty: of all
};

struct Bytes {
    std::uint64_t address = 0;
    std::uint64_t length = 0;
};

struct Live {
    std::uint64_t device_allocations = 0;
    std::uint64_t host_allocations = 0;
    std::uint64_t registrations = 0;
    std::uint64_t streams = 0;
    std::uint64_t events = 0;
    std::uint64_t modules = 0;
    std::uint64_t contexts = 0;  // retained and not released
    bool operator==(const Live&) const = default;
};

// The byte that launch_compute writes at `offset` of a range.
inline std::uint8_t pattern_byte(std::uint64_t pattern, std::uint64_t offset) {
    return static_cast<std::uint8_t>((pattern + offset) * 0x9e3779b97f4a7c15u >> 56);
}

// Safe to call from any thread, but for reset.
class __attribute__((visibility("default"))) Control {
public:
    virtual ~Control() = default;

    // Waits for running work, forgets everything and starts again. No other thread may be in the driver.
    virtual void reset(const Settings& settings) = 0;

    // The calling thread's calls are neither counted nor made to fail, but for a lost device.
    virtual void exempt_thread(bool is_exempt) = 0;
    virtual void arm_fault(const Fault& fault) = 0;
    virtual std::uint64_t counted_calls() = 0;  // since arm_fault, of those that the fault is about
    // Since arm_fault; a test that arms a fault says nothing unless it struck.
    virtual std::uint64_t struck_calls() = 0;
    virtual std::string struck_function() = 0;  // the last one; empty: none
    virtual void lose_device(int sticky_status) = 0;
    virtual void stall(bool is_stalled) = 0;  // no operation begins while it is

    // Work put into `stream` is recorded and never run, as in a capture (of the global mode) whose graph is never
    // launched. The calling thread is the one that captures.
    virtual void begin_capture(void* stream) = 0;
    // Returns true if another call broke the capture; the real driver's call gives
    // CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
    virtual bool end_capture(void* stream) = 0;

    // A kernel of a model on `stream`: reads and writes device memory.
    virtual void launch_compute(void* stream, std::span<const Bytes> reads, std::span<const Bytes> writes,
                                std::uint64_t pattern) = 0;
    // The calling thread touches memory that copies or other threads touch too; to be called before it does.
    virtual void host_reads(const void* address, std::uint64_t length) = 0;
    virtual void host_writes(const void* address, std::uint64_t length) = 0;

    // All host threads count as one, in the order of their calls, which hides a test that looks at memory before it was
    // told that it may. A thread that knows only what it saw itself is checked; what other threads saw it learns by
    // hear_others, when they have told it.
    virtual void keep_own_clock(bool keeps) = 0;
    virtual void hear_others() = 0;

    // A hand-over between host threads, such as a queue's push and pop under the same token: who acquires it knows what
    // those knew who released it before. To be called before the thing is handed over, and after it was taken. A token
    // for each thing finds more than one for all that a queue ever held.
    virtual void release(std::uint64_t token) = 0;
    virtual void acquire(std::uint64_t token) = 0;

    // Names the calling thread's current step, for reports.
    virtual void name_step(const std::string& step) = 0;
    // Reports are kept instead of ending the process; what was reported is not carried out.
    virtual void keep_reports(bool keeps) = 0;
    virtual std::vector<std::string> take_reports() = 0;

    // Device memory without an operation, at once and unchecked.
    virtual void peek(std::uint64_t address, std::span<std::uint8_t> bytes) = 0;
    virtual void poke(std::uint64_t address, std::span<const std::uint8_t> bytes) = 0;

    virtual Live live() = 0;
    virtual std::vector<int> stream_priorities() = 0;                 // of those alive, in the order of their making
    virtual std::uint64_t calls_of(const std::string& function) = 0;  // since reset, failed ones too
};

// The control of the library at `path`. Null: there is none.
inline Control* open_control(const std::string& path) {
    const Result<DynamicLibrary> library = DynamicLibrary::open(path);
    if (!library.ok()) {
        return nullptr;
    }
    using Door = Control* (*)();
    const auto door = reinterpret_cast<Door>(library.value().find("fake_cuda_control"));
    return door == nullptr ? nullptr : door();
}

}  // namespace kvo::fake
