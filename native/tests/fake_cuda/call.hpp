// One call of an entry point: holds the driver, counts, and knows whether it has to fail.
#pragma once

#include <chrono>
#include <mutex>

#include "fake_cuda/driver.hpp"

namespace kvo::fake {

enum class Needs : std::uint8_t { nothing, context };

class Call {
public:
    explicit Call(const char* function, Needs needs = Needs::context)
        : lock_(driver.streams().mutex), entry_(driver.enter(function, needs == Needs::context, lock_)) {
        driver.wait_if_lost(lock_);
    }

    bool fails() const { return entry_.status != 0; }
    bool is_refused() const { return entry_.is_refused; }
    int status() const { return entry_.status; }
    int later() const { return entry_.later; }

    // Reports what no program may do and gives the status for it.
    int refuse(const char* what, int status) {
        driver.check().report(what);
        return status;
    }

    // Waits for what `is_done` asks, or until the device is lost; without an end it is reported.
    template <typename Condition>
    int wait(const char* what, Condition is_done) {
        StreamState& state = driver.streams();
        if (!state.changed.wait_for(lock_, std::chrono::milliseconds(driver.settings().patience_ms),
                                    [&] { return state.lost_status != 0 || is_done(); })) {
            return refuse(what, kNotReady);
        }
        driver.wait_if_lost(lock_);
        return state.lost_status;
    }

    Driver& driver = Driver::instance();

private:
    std::unique_lock<std::mutex> lock_;
    Entry entry_;
};

template <typename Function>
void* address_of(Function* function) {
    return reinterpret_cast<void*>(function);
}

}  // namespace kvo::fake
