// A device and the thread that steps it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.hpp"
#include "disk/device.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// For any thread.
class DeviceThread {
public:
    static Result<std::unique_ptr<DeviceThread>> create(DeviceTerms terms);
    ~DeviceThread();  // closes without waiting
    DeviceThread(const DeviceThread&) = delete;
    DeviceThread& operator=(const DeviceThread&) = delete;

    bool contains(const KeyMark& mark) { return shared_->device->contains(mark); }
    bool can_read() const noexcept { return shared_->device->can_read(); }
    bool can_write() const noexcept { return shared_->device->can_write(); }
    DeviceHealth health() { return shared_->device->health(); }
    std::uint32_t segment_count() const noexcept { return shared_->device->segment_count(); }

    void add(DevicePart part);

    // Returns the segment's records, or nothing if the device does not answer in time.
    std::optional<std::vector<FooterEntry>> list_segment(std::uint32_t number, int timeout_ms);

    // Returns false if the thread has not ended in time. It is then left behind and may still finish its work.
    bool close(int timeout_ms);

private:
    struct Listing {
        std::uint32_t number = 0;
        std::optional<std::vector<FooterEntry>> entries;
    };
    // Owned by the thread as well, which may be stuck in a call that never returns.
    struct Shared {
        ~Shared();

        std::unique_ptr<Device> device;
        FileDescriptor wake;
        std::mutex lock;
        std::condition_variable changed;
        std::deque<DevicePart> parts;
        std::deque<std::shared_ptr<Listing>> listings;
        bool is_stopping = false;
        bool has_ended = false;
        int close_ms = 0;

        void tell() const;
        void run();
        void take_in();
    };

    explicit DeviceThread(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

    std::shared_ptr<Shared> shared_;
};

}  // namespace kvo
