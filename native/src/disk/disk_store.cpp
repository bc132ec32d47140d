#include "disk/disk_store.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/status.hpp"
#include "disk/device_thread.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {
namespace {

using Clock = std::chrono::steady_clock;

// Tickets of the batches that have ended. The devices' threads add to it, and may outlive the store.
struct EndedList {
    std::mutex lock;
    std::vector<std::uint64_t> tickets;
    FileDescriptor file;

    void tell(std::uint64_t ticket) {
        const std::lock_guard hold(lock);
        tickets.push_back(ticket);
        const std::uint64_t one = 1;
        static_cast<void>(!write(file.number(), &one, sizeof one));
    }
    std::vector<std::uint64_t> take() {
        const std::lock_guard hold(lock);
        std::uint64_t count = 0;
        static_cast<void>(!read(file.number(), &count, sizeof count));
        return std::exchange(tickets, {});
    }
};

int left_ms(Instant end) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    return static_cast<int>(std::max<std::int64_t>(0, left));
}

}  // namespace

class DiskStore::Core {
public:
    explicit Core(StoreTerms terms) : terms_(std::move(terms)) {}
    Status start();

    Result<std::uint64_t> submit(const BatchPointer& batch);
    std::vector<BatchPointer> poll();
    int file() const noexcept { return readable_.number(); }
    void contains(std::span<const RecordKey> keys, std::span<std::uint8_t> found);
    Result<std::uint64_t> scan(std::uint64_t cursor, std::vector<ListedRecord>& records, int timeout_ms);
    std::vector<DeviceHealth> health();
    Status close(int timeout_ms);
    bool is_of_this_process() const noexcept { return getpid() == process_; }

private:
    std::size_t device_of(const KeyMark& mark);
    std::size_t next_writable();
    std::vector<DevicePart> route(const BatchPointer& batch);
    void arm(Instant deadline);

    const StoreTerms terms_;
    const pid_t process_ = getpid();
    std::vector<std::unique_ptr<DeviceThread>> devices_;
    std::shared_ptr<EndedList> ended_ = std::make_shared<EndedList>();
    FileDescriptor timer_;
    FileDescriptor readable_;  // an epoll of what has ended and of the timer

    std::mutex lock_;
    std::map<std::uint64_t, BatchPointer> under_way_;
    std::uint64_t last_ticket_ = 0;
    std::size_t turn_ = 0;
    Instant armed_ = Instant::max();
    bool is_closed_ = false;
};

Status DiskStore::Core::start() {
    ended_->file = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    timer_ = FileDescriptor(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    readable_ = FileDescriptor(epoll_create1(EPOLL_CLOEXEC));
    for (const int file : {ended_->file.number(), timer_.number()}) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.fd = file;
        if (file < 0 || epoll_ctl(readable_.number(), EPOLL_CTL_ADD, file, &event) != 0) {
            return system_fault("a file to wait for a disk by", errno);
        }
    }
    for (const DeviceTerms& terms : terms_.devices) {
        Result<std::unique_ptr<DeviceThread>> device = DeviceThread::create(terms);
        if (!device.ok()) {
            return device.fault();
        }
        devices_.push_back(std::move(device.value()));
    }
    return {};
}

// The number of devices: none has it.
std::size_t DiskStore::Core::device_of(const KeyMark& mark) {
    std::size_t number = 0;
    while (number < devices_.size() && !devices_[number]->contains(mark)) {
        ++number;
    }
    return number;
}

std::size_t DiskStore::Core::next_writable() {
    for (std::size_t tried = 0; tried < devices_.size(); ++tried) {
        const std::size_t number = turn_++ % devices_.size();
        if (devices_[number]->can_write()) {
            return number;
        }
    }
    return devices_.size();
}

// Divides a batch among the devices. Items that no device can serve end here.
std::vector<DevicePart> DiskStore::Core::route(const BatchPointer& batch) {
    std::vector<DevicePart> parts(devices_.size());
    std::size_t chosen = devices_.size();
    std::uint64_t in_stripe = 0;
    for (std::uint32_t i = 0; i < batch->size(); ++i) {
        const DiskItem& item = batch->item(i);
        std::size_t number = device_of(mark_of(item.key));
        if (number == devices_.size() && batch->verb == DiskVerb::put) {
            if (chosen == devices_.size() || in_stripe >= terms_.stripe_bytes || !devices_[chosen]->can_write()) {
                chosen = next_writable();
                in_stripe = 0;
            }
            in_stripe += item.length;
            number = chosen;
        }
        if (number < devices_.size()) {
            parts[number].items.push_back(i);
        } else {
            const bool is_put = batch->verb == DiskVerb::put;
            batch->end(i, is_put ? DiskOutcome::unavailable : DiskOutcome::missing);
        }
    }
    return parts;
}

void DiskStore::Core::arm(Instant deadline) {
    if (deadline >= armed_) {
        return;
    }
    armed_ = deadline;
    const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
    itimerspec when{};
    when.it_value = {since / 1000000000, since % 1000000000};
    when.it_value.tv_nsec = std::max<long>(when.it_value.tv_nsec, 1);
    timerfd_settime(timer_.number(), TFD_TIMER_ABSTIME, &when, nullptr);
}

Result<std::uint64_t> DiskStore::Core::submit(const BatchPointer& batch) {
    const std::lock_guard hold(lock_);
    if (is_closed_) {
        return Status(Code::unavailable, "the disk tier is closed");
    }
    if (under_way_.size() >= terms_.batch_limit) {
        return Status(Code::unavailable, "all " + std::to_string(terms_.batch_limit) +
                                             " batches that may be under way are; poll to make room");
    }
    batch->ticket = ++last_ticket_;
    batch->on_end = [ended = ended_, ticket = batch->ticket] { ended->tell(ticket); };
    under_way_.emplace(batch->ticket, batch);
    arm(batch->deadline);
    if (batch->size() == 0) {
        ended_->tell(batch->ticket);
    }
    std::vector<DevicePart> parts = route(batch);
    for (std::size_t number = 0; number < parts.size(); ++number) {
        if (!parts[number].items.empty()) {
            parts[number].batch = batch;
            devices_[number]->add(std::move(parts[number]));
        }
    }
    return batch->ticket;
}

std::vector<BatchPointer> DiskStore::Core::poll() {
    const std::lock_guard hold(lock_);
    std::uint64_t count = 0;
    static_cast<void>(!read(timer_.number(), &count, sizeof count));
    const Instant now = Clock::now();
    if (armed_ <= now) {
        armed_ = Instant::max();
        Instant next = Instant::max();
        for (const auto& [ticket, batch] : under_way_) {
            if (batch->deadline <= now && !batch->has_ended()) {
                batch->expire();
            }
            if (!batch->has_ended()) {
                // Items whose memory is being copied end in a later call.
                next = std::min(next, std::max(batch->deadline, now + std::chrono::milliseconds(1)));
            }
        }
        arm(next);
    }
    std::vector<BatchPointer> ended;
    for (const std::uint64_t ticket : ended_->take()) {
        const auto found = under_way_.find(ticket);
        ended.push_back(std::move(found->second));
        under_way_.erase(found);
    }
    return ended;
}

void DiskStore::Core::contains(std::span<const RecordKey> keys, std::span<std::uint8_t> found) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
        found[i] = device_of(mark_of(keys[i])) < devices_.size() ? 1 : 0;
    }
}

Result<std::uint64_t> DiskStore::Core::scan(std::uint64_t cursor, std::vector<ListedRecord>& records, int timeout_ms) {
    const Instant end = Clock::now() + std::chrono::milliseconds(timeout_ms);
    std::uint64_t before = 0;
    for (const std::unique_ptr<DeviceThread>& device : devices_) {
        for (; cursor < before + device->segment_count(); ++cursor) {
            const auto entries = device->list_segment(static_cast<std::uint32_t>(cursor - before), left_ms(end));
            if (!entries) {
                return Status(Code::unavailable, "the disk did not answer in time");
            }
            for (const FooterEntry& entry : *entries) {
                const std::uint64_t digest = is_sealed(entry) ? kNoDigest : entry.digest;
                records.push_back({entry.key, entry.parent, entry.length, digest});
            }
            if (!entries->empty()) {
                return cursor + 1;
            }
        }
        before += device->segment_count();
    }
    return std::uint64_t{0};
}

std::vector<DeviceHealth> DiskStore::Core::health() {
    std::vector<DeviceHealth> all;
    for (const std::unique_ptr<DeviceThread>& device : devices_) {
        all.push_back(device->health());
    }
    return all;
}

Status DiskStore::Core::close(int timeout_ms) {
    const Instant end = Clock::now() + std::chrono::milliseconds(timeout_ms);
    {
        const std::lock_guard hold(lock_);
        is_closed_ = true;
    }
    bool is_over = true;
    for (const std::unique_ptr<DeviceThread>& device : devices_) {
        is_over = device->close(left_ms(end)) && is_over;
    }
    const std::lock_guard hold(lock_);
    for (const auto& [ticket, batch] : under_way_) {
        // This batch is at a device that does not answer. Items that are being copied right now end a moment later.
        for (batch->expire(); !batch->has_ended(); batch->expire()) {
            std::this_thread::yield();
        }
    }
    return is_over ? Status() : Status(Code::failed, "a disk does not answer; its memory and thread are left behind");
}

DiskStore::DiskStore(std::unique_ptr<Core> core) : core_(std::move(core)) {}

DiskStore::~DiskStore() {
    if (!core_->is_of_this_process()) {
        static_cast<void>(core_.release());
        return;
    }
    constexpr int kLastWaitMs = 5000;
    static_cast<void>(core_->close(kLastWaitMs));
}

Result<std::unique_ptr<DiskStore>> DiskStore::create(StoreTerms terms) {
    if (terms.devices.empty() || terms.batch_limit == 0) {
        return Status(Code::invalid, "a disk tier has at least one device, and room for a batch");
    }
    auto core = std::make_unique<Core>(std::move(terms));
    if (Status status = core->start(); !status.ok()) {
        return status;
    }
    return std::unique_ptr<DiskStore>(new DiskStore(std::move(core)));
}

Result<std::uint64_t> DiskStore::submit(const BatchPointer& batch) { return core_->submit(batch); }

std::vector<BatchPointer> DiskStore::poll() { return core_->poll(); }

int DiskStore::file() const noexcept { return core_->file(); }

void DiskStore::contains(std::span<const RecordKey> keys, std::span<std::uint8_t> found) {
    core_->contains(keys, found);
}

Result<std::uint64_t> DiskStore::scan(std::uint64_t cursor, std::vector<ListedRecord>& records, int timeout_ms) {
    return core_->scan(cursor, records, timeout_ms);
}

std::vector<DeviceHealth> DiskStore::health() { return core_->health(); }

bool DiskStore::wait_open(int timeout_ms) {
    const Instant end = Clock::now() + std::chrono::milliseconds(timeout_ms);
    const auto is_opening = [](const DeviceHealth& one) { return one.state == DeviceState::opening; };
    while (std::ranges::any_of(core_->health(), is_opening)) {
        if (Clock::now() >= end) {
            return false;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

Status DiskStore::close(int timeout_ms) { return core_->close(timeout_ms); }

}  // namespace kvo
