// The test's door into the driver.
#include <cstring>
#include <utility>

#include "fake_cuda/driver.hpp"

namespace kvo::fake {
namespace {

class DriverControl final : public Control {
public:
    void reset(const Settings& settings) override { driver_.reset(settings); }

    void exempt_thread(bool is_exempt) override {
        const std::lock_guard lock(mutex_);
        driver_.host().is_exempt = is_exempt;
    }
    void arm_fault(const Fault& fault) override {
        const std::lock_guard lock(mutex_);
        if ((fault.loses_device || fault.kind == FaultKind::operation_fails) && !is_sticky(fault.status)) {
            driver_.check().report("arm_fault with a status that loses no device, " + std::to_string(fault.status));
            return;
        }
        driver_.faults().arm(fault, driver_.settings().seed);
    }
    std::uint64_t counted_calls() override {
        const std::lock_guard lock(mutex_);
        return driver_.faults().calls();
    }
    std::uint64_t struck_calls() override {
        const std::lock_guard lock(mutex_);
        return driver_.faults().struck();
    }
    std::string struck_function() override {
        const std::lock_guard lock(mutex_);
        return driver_.faults().struck_function();
    }
    void lose_device(int status) override {
        std::unique_lock lock(mutex_);
        if (!is_sticky(status)) {
            driver_.check().report("lose_device with a status that loses none, " + std::to_string(status));
            return;
        }
        driver_.lose(status);
        driver_.wait_if_lost(lock);
    }
    void stall(bool is_stalled) override {
        const std::lock_guard lock(mutex_);
        driver_.streams().is_stalled = is_stalled;
        driver_.streams().changed.notify_all();
    }

    void begin_capture(void* stream) override {
        const std::lock_guard lock(mutex_);
        Stream* const queue = driver_.stream(stream);
        if (queue == nullptr || queue->capture() != nullptr) {
            driver_.check().report("begin_capture on what is no stream, or captures already");
            return;
        }
        queue->capture() = driver_.captures().begin();
    }
    bool end_capture(void* stream) override {
        const std::lock_guard lock(mutex_);
        Stream* const queue = driver_.stream(stream);
        if (queue == nullptr || queue->capture() == nullptr) {
            driver_.check().report("end_capture on what does not capture");
            return true;
        }
        const std::shared_ptr<Capture> capture = std::exchange(queue->capture(), nullptr);
        driver_.captures().end(*capture);
        return capture->is_broken;
    }

    void launch_compute(void* stream, std::span<const Bytes> reads, std::span<const Bytes> writes,
                        std::uint64_t pattern) override {
        const std::lock_guard lock(mutex_);
        Stream* const queue = driver_.stream(stream);
        if (queue == nullptr) {
            driver_.check().report("launch_compute on what is no stream");
            return;
        }
        driver_.submit(*queue, "compute",
                       Compute{{reads.begin(), reads.end()}, {writes.begin(), writes.end()}, pattern});
    }
    void host_reads(const void* address, std::uint64_t length) override {
        const std::lock_guard lock(mutex_);
        driver_.touch(reinterpret_cast<std::uint64_t>(address), length, AccessKind::read, "the host");
    }
    void host_writes(const void* address, std::uint64_t length) override {
        const std::lock_guard lock(mutex_);
        driver_.touch(reinterpret_cast<std::uint64_t>(address), length, AccessKind::write, "the host");
    }

    void keep_own_clock(bool keeps) override {
        const std::lock_guard lock(mutex_);
        driver_.keep_own_clock(keeps);
    }
    void hear_others() override {
        const std::lock_guard lock(mutex_);
        driver_.hear_others();
    }

    void release(std::uint64_t token) override {
        const std::lock_guard lock(mutex_);
        driver_.release(token);
    }
    void acquire(std::uint64_t token) override {
        const std::lock_guard lock(mutex_);
        driver_.acquire(token);
    }

    void name_step(const std::string& step) override {
        const std::lock_guard lock(mutex_);
        driver_.host().step = step;
    }
    void keep_reports(bool keeps) override {
        const std::lock_guard lock(mutex_);
        driver_.check().keep_reports(keeps);
    }
    std::vector<std::string> take_reports() override {
        const std::lock_guard lock(mutex_);
        return driver_.check().take_reports();
    }

    void peek(std::uint64_t address, std::span<std::uint8_t> bytes) override {
        const std::lock_guard lock(mutex_);
        if (const std::uint8_t* const place = locate(address, bytes.size())) {
            std::memcpy(bytes.data(), place, bytes.size());
        }
    }
    void poke(std::uint64_t address, std::span<const std::uint8_t> bytes) override {
        const std::lock_guard lock(mutex_);
        if (std::uint8_t* const place = locate(address, bytes.size())) {
            std::memcpy(place, bytes.data(), bytes.size());
        }
    }

    Live live() override {
        const std::lock_guard lock(mutex_);
        return driver_.live();
    }
    std::vector<int> stream_priorities() override {
        const std::lock_guard lock(mutex_);
        return driver_.stream_priorities();
    }
    std::uint64_t calls_of(const std::string& function) override {
        const std::lock_guard lock(mutex_);
        return driver_.calls_of(function);
    }

private:
    std::uint8_t* locate(std::uint64_t address, std::uint64_t length) {
        const Result<Place> place = driver_.check().memory().locate(address, length, false);
        if (!place.ok()) {
            driver_.check().report("the test looks at " + place.fault().message());
            return nullptr;
        }
        return place.value().at;
    }

    Driver& driver_ = Driver::instance();
    std::mutex& mutex_ = driver_.streams().mutex;
};

}  // namespace
}  // namespace kvo::fake

extern "C" __attribute__((visibility("default"))) kvo::fake::Control* fake_cuda_control() {
    static kvo::fake::DriverControl control;
    return &control;
}
