// Whether a device can be read and written, what is wrong with it, and when that is looked at again.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <utility>

#include "disk/device_terms.hpp"

namespace kvo {

// Only the device's thread may call it, except for the members marked for any thread.
class DeviceCondition {
public:
    // `terms` outlive it.
    explicit DeviceCondition(const DeviceTerms& terms) : terms_(terms), next_probe_(terms.now()) {}

    // Any thread may call these.
    bool can_read() const noexcept { return can_read_.load(); }
    bool can_write() const noexcept { return can_write_.load(); }
    DeviceHealth health();

    DeviceState state() const noexcept { return state_; }
    void set(DeviceState state, const std::string& reason);
    void end();  // nothing can be read or written any more

    // A step notes the problems that it meets; the next step takes them and changes the device's state.
    void note_read_problem(std::string what) { read_problem_ = std::move(what); }
    void note_write_problem(std::string what) { write_problem_ = std::move(what); }
    std::string take_read_problem() { return std::exchange(read_problem_, {}); }
    std::string take_write_problem() { return std::exchange(write_problem_, {}); }
    bool is_reading() const { return can_read() && read_problem_.empty(); }
    bool is_writing() const { return can_write() && write_problem_.empty(); }

    Instant next_probe() const noexcept { return next_probe_; }
    void probe_next() { next_probe_ = terms_.now() + terms_.probe_interval; }
    // Sets the next probe after a failure. A fault that probes do not see returns again and again, so the delay grows
    // each time.
    void probe_later();

    // Sets the answer of `health()`, with the current state filled in. The reason of a device that is ready is the
    // caller's, that of another state the one that was set with it.
    void publish(DeviceHealth health);

private:
    const DeviceTerms& terms_;
    DeviceState state_ = DeviceState::opening;
    std::string reason_;
    std::string write_problem_;
    std::string read_problem_;
    Instant next_probe_;
    Instant ready_since_;
    std::chrono::milliseconds delay_{0};  // of the first probe after it has failed

    std::atomic<bool> can_read_ = false;
    std::atomic<bool> can_write_ = false;
    std::mutex health_lock_;
    DeviceHealth health_;
};

}  // namespace kvo
