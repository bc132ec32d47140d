#include "disk/device_thread.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.hpp"

namespace kvo {
namespace {

constexpr int kNiceness = 5;

}  // namespace

Result<std::unique_ptr<DeviceThread>> DeviceThread::create(DeviceTerms terms) {
    Result<std::unique_ptr<Device>> device = Device::create(std::move(terms));
    if (!device.ok()) {
        return device.fault();
    }
    auto shared = std::make_shared<Shared>();
    shared->device = std::move(device.value());
    shared->wake = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!shared->wake.is_open()) {
        return system_fault("eventfd", errno);
    }
    try {
        std::thread([shared] {
            pthread_setname_np(pthread_self(), "kvoffload-disk");
            // Where processors are short, engines and the server's other threads go first. A thread's own, on Linux.
            static_cast<void>(setpriority(PRIO_PROCESS, 0, kNiceness));
            shared->run();
        }).detach();
    } catch (const std::system_error& fault) {
        return Status(Code::failed, std::string("no thread for a disk can be started: ") + fault.what());
    }
    return std::unique_ptr<DeviceThread>(new DeviceThread(std::move(shared)));
}

DeviceThread::~DeviceThread() { close(0); }

DeviceThread::Shared::~Shared() {
    if (!has_ended) {
        static_cast<void>(device.release());  // the kernel may still write to its memory
    }
}

void DeviceThread::Shared::tell() const {
    const std::uint64_t one = 1;
    static_cast<void>(!write(wake.number(), &one, sizeof one));
}

void DeviceThread::add(DevicePart part) {
    {
        const std::lock_guard hold(shared_->lock);
        if (!shared_->is_stopping) {
            shared_->parts.push_back(std::move(part));
            shared_->tell();
            return;
        }
    }
    for (const std::uint32_t item : part.items) {
        part.batch->end(item, DiskOutcome::unavailable);
    }
}

std::optional<std::vector<FooterEntry>> DeviceThread::list_segment(std::uint32_t number, int timeout_ms) {
    auto listing = std::make_shared<Listing>();
    listing->number = number;
    std::unique_lock hold(shared_->lock);
    shared_->listings.push_back(listing);
    shared_->tell();
    shared_->changed.wait_for(hold, std::chrono::milliseconds(timeout_ms),
                              [&] { return listing->entries.has_value(); });
    return listing->entries;
}

bool DeviceThread::close(int timeout_ms) {
    std::unique_lock hold(shared_->lock);
    if (!shared_->is_stopping) {
        shared_->is_stopping = true;
        shared_->close_ms = timeout_ms;
    }
    shared_->tell();
    return shared_->changed.wait_for(hold, std::chrono::milliseconds(timeout_ms), [&] { return shared_->has_ended; });
}

void DeviceThread::Shared::take_in() {
    std::uint64_t count = 0;
    static_cast<void>(!read(wake.number(), &count, sizeof count));
    std::unique_lock hold(lock);
    std::deque<DevicePart> taken = std::exchange(parts, {});
    std::deque<std::shared_ptr<Listing>> asked = std::exchange(listings, {});
    hold.unlock();
    for (DevicePart& part : taken) {
        device->add(std::move(part));
    }
    for (const std::shared_ptr<Listing>& listing : asked) {
        std::vector<FooterEntry> entries = device->list_segment(listing->number);
        hold.lock();
        listing->entries = std::move(entries);
        hold.unlock();
        changed.notify_all();
    }
}

void DeviceThread::Shared::run() {
    for (;;) {
        take_in();
        const Instant wake_at = device->step();
        {
            const std::lock_guard hold(lock);
            if (is_stopping) {
                break;
            }
        }
        const auto left = std::chrono::ceil<std::chrono::microseconds>(wake_at - std::chrono::steady_clock::now());
        constexpr std::chrono::microseconds kLongest{1000000};
        const auto waited = std::clamp(left, std::chrono::microseconds{0}, kLongest);
        const timespec timeout{waited.count() / 1000000, waited.count() % 1000000 * 1000};
        pollfd files[] = {{wake.number(), POLLIN, 0}, {device->file(), POLLIN, 0}};
        ppoll(files, 2, &timeout, nullptr);
    }
    take_in();
    device->step();  // what came last is begun, too
    const bool is_over = device->close(close_ms);
    const std::lock_guard hold(lock);
    has_ended = is_over;
    changed.notify_all();
}

}  // namespace kvo
