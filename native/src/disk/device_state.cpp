// Device: its folder's coming and going.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "disk/device.hpp"
#include "shim/system_fault.hpp"

namespace kvo {
namespace {

constexpr std::chrono::seconds kFullRetry{60};
constexpr std::uint32_t kFailedReadLimit = 8;  // in a row, until the device is taken for gone
constexpr std::uint32_t kUnreadableLimit = 8;  // segments, likewise
constexpr std::chrono::seconds kLongestDelay{60};

}  // namespace

void Device::look_after(Instant now) {
    if (!read_problem_.empty()) {
        become_absent(std::exchange(read_problem_, {}));
    }
    if (!write_problem_.empty()) {
        become_read_only(std::exchange(write_problem_, {}));
    }
    if (now < next_probe_) {
        return;
    }
    if (state_ == DeviceState::opening || state_ == DeviceState::absent) {
        open();
    } else if (const Status status = folder_->check(); !status.ok()) {
        become_absent(status.message());
    } else if (state_ == DeviceState::read_only) {
        const Status probed = folder_->try_writing();
        counts_.written_bytes += kIoAlignment;
        budget_.charge(kIoAlignment);
        is_full_ = false;
        set_state(probed.ok() ? DeviceState::ready : DeviceState::read_only, probed.message());
    } else if (is_full_ && now >= full_since_ + kFullRetry) {
        is_full_ = false;  // somebody may have made room
    }
    next_probe_ = terms_.now() + terms_.probe_interval;
}

void Device::open() {
    const bool is_quiet = runner_.queue().pending() == runner_.queue().held() && sealing_.empty();
    if (!is_quiet) {
        return;  // the files stay open under what is still to be done with them
    }
    const bool is_first = store_ == 0;
    if (reader_) {
        reader_->give_up(DiskOutcome::unavailable);
    }
    reader_.reset();
    folder_.reset();
    segments_ = SegmentTable(segments_.size());
    file_count_ = 0;
    Result<DiskFolder> folder =
        DiskFolder::open({terms_.path, terms_.segment_bytes, terms_.may_create && is_first, store_});
    if (!folder.ok()) {
        set_state(DeviceState::absent, folder.fault().message());
        return;
    }
    store_ = folder.value().store();
    folder_.emplace(std::move(folder.value()));
    if (is_first) {
        budget_ = WriteBudget(terms_.daily_bytes, terms_.now(), folder_->is_new());
    }
    if (const Status status = recover(); !status.ok()) {
        become_absent(status.message());
        return;
    }
    failed_reads_ = 0;
    is_full_ = false;
    reader_ = std::make_unique<DeviceReader>(
        ReaderSeat{[this](std::uint32_t segment, int error) { told_read(segment, error); },
                   [this](const LostRecord& record, int error) { told_lost(record, error); }},
        terms_, runner_, read_pool_, segments_, index_, counts_, coding_);
    set_state(DeviceState::ready, {});
}

Status Device::recover() {
    const Instant begun = terms_.now();
    const Result<std::vector<std::uint32_t>> numbers = folder_->list_segments();
    if (!numbers.ok()) {
        return numbers.fault();
    }
    std::vector<std::pair<std::uint32_t, FoundSegment>> found;
    std::vector<std::uint32_t> unreadable;
    std::uint32_t dropped = 0;
    for (const std::uint32_t number : numbers.value()) {
        Result<FileDescriptor> file = number < segments_.size() ? folder_->open_segment(number)
                                                                : Result<FileDescriptor>(Status(Code::unavailable, ""));
        if (!file.ok() && file.fault().code() != Code::unavailable) {
            return file.fault();
        }
        if (!file.ok()) {
            // Beyond the capacity, or not a whole file of ours in our own folder.
            ++dropped;
            if (const Status status = folder_->remove_segment(number); !status.ok()) {
                return status;
            }
            continue;
        }
        SegmentFile& segment = segments_[number];
        segment.file = std::move(file.value());
        segment.state = SegmentState::empty;
        ++file_count_;
        int error = 0;
        auto one = find_readable(segment.file.number(), error);
        if (error != 0 && !one) {
            unreadable.push_back(number);
        }
        const bool has_gone = error == ETIMEDOUT || error == ENOMEM || unreadable.size() == kUnreadableLimit;
        if (has_gone || (!unreadable.empty() && unreadable.size() == numbers.value().size())) {
            return {Code::failed, "disk folder " + terms_.path +
                                      ": reads fail: " + system_fault(segment_file_name(number), error).message()};
        }
        if (one && !one->entries.empty()) {
            found.emplace_back(number, std::move(*one));
        } else {
            dropped += one ? 0 : 1;
        }
    }
    // What was written later counts.
    std::ranges::sort(found, {}, [](const auto& one) { return one.second.life.generation; });
    for (auto& [number, segment] : found) {
        adopt_segment(number, std::move(segment));
    }
    for (const std::uint32_t number : unreadable) {
        // Else what is removed meanwhile could be back, should it be readable again. It may not be possible now.
        if (folder_->remove_segment(number).ok()) {
            segments_[number] = SegmentFile();
            --file_count_;
        }
    }
    counts_.dropped_segments += dropped;
    counts_.recovery_us =
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(terms_.now() - begun).count());
    return {};
}

// The first error, 0 if there was none. A device that does not answer is asked once.
std::optional<FoundSegment> Device::find_readable(int file, int& error) {
    const ReadExactly read = [&](std::uint64_t offset, std::span<std::byte> target) {
        const int now = error == ETIMEDOUT ? error : read_exactly(file, offset, target);
        error = now == ETIMEDOUT || error == 0 ? now : error;
        return now == 0;
    };
    auto found = find_segment(read, store_, terms_.segment_bytes, terms_.record_limit_bytes);
    if (found) {
        found->is_whole = error == 0;
    }
    return found;
}

void Device::adopt_segment(std::uint32_t number, FoundSegment found) {
    SegmentFile& segment = segments_[number];
    segment.state = SegmentState::full;
    segment.life = found.life;
    // One that could not be read everywhere gets none: there may be more in it.
    segment.has_footer = found.has_footer || (found.is_whole && write_footer(number, found));
    generation_ = std::max(generation_, found.life.generation);
    ++counts_.recovered_segments;
    counts_.scanned_segments += found.has_footer ? 0 : 1;
    const std::lock_guard hold(index_.lock);
    for (const FooterEntry& entry : found.entries) {
        if (entry.flag == RecordFlag::removal) {
            ++segment.removals;
            index_.index.erase(mark_of(entry.key));
        } else {
            ++counts_.recovered_records;
            index_.index.put(mark_of(entry.key), place_of(number, entry));
        }
    }
}

// Of a segment whose writer ended without one. Its room was kept free.
bool Device::write_footer(std::uint32_t number, const FoundSegment& found) {
    const std::uint64_t bytes = footer_bytes(found.entries.size());
    Result<AlignedMemory> made = AlignedMemory::create(bytes);
    const FooterEntry& last = found.entries.back();
    if (!made.ok() || last.offset + record_footprint(stored_length(last)) > terms_.segment_bytes - bytes) {
        return false;
    }
    auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    std::memcpy(memory->start(), found.entries.data(), found.entries.size() * sizeof(FooterEntry));
    const FooterTail tail = make_footer_tail(found.life, found.entries.size(), terms_.segment_bytes,
                                             memory->span().first(bytes - sizeof(FooterTail)));
    std::memcpy(memory->start() + bytes - sizeof tail, &tail, sizeof tail);
    const int file = segments_[number].file.number();
    counts_.written_bytes += bytes;
    budget_.charge(bytes);
    return do_now(IoKind::write, file, terms_.segment_bytes - bytes, memory) == 0 &&
           do_now(IoKind::sync, file, 0, memory) == 0;
}

// An errno, 0 if all is there.
int Device::read_exactly(int file, std::uint64_t offset, std::span<std::byte> target) {
    Result<AlignedMemory> made = AlignedMemory::create(target.size());
    if (!made.ok()) {
        return ENOMEM;
    }
    const auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    if (const int error = do_now(IoKind::read, file, offset, memory); error != 0) {
        return error;
    }
    counts_.read_bytes += target.size();
    std::memcpy(target.data(), memory->start(), target.size());
    return 0;
}

// Waits for the end, or the timeout of all I/O. An errno.
int Device::do_now(IoKind kind, int file, std::uint64_t offset, const std::shared_ptr<AlignedMemory>& memory) {
    auto outcome = std::make_shared<std::optional<int>>();
    runner_.run(
        {kind, file, offset, memory->start(), static_cast<std::uint32_t>(memory->bytes()), 0},
        terms_.now() + terms_.io_timeout, [outcome](int error) { *outcome = error; }, [memory] {});
    for (runner_.poll(terms_.now()); !outcome->has_value(); runner_.poll(terms_.now())) {
        wait_readable(this->file(), 10);
    }
    counts_.io_errors += **outcome == 0 ? 0 : 1;
    return **outcome;
}

void Device::set_state(DeviceState state, const std::string& reason) {
    ready_since_ = state == DeviceState::ready && state_ != state ? terms_.now() : ready_since_;
    state_ = state;
    reason_ = reason;
    can_read_ = state == DeviceState::ready || state == DeviceState::read_only;
    can_write_ = state == DeviceState::ready;
}

void Device::become_read_only(const std::string& reason) {
    if (state_ == DeviceState::ready) {
        set_state(DeviceState::read_only, reason);
        drop_writers(DiskOutcome::failed);
        begin_waiting();
    }
}

void Device::become_absent(const std::string& reason) {
    set_state(DeviceState::absent, reason);
    drop_writers(DiskOutcome::unavailable);
    if (reader_) {
        reader_->give_up(DiskOutcome::unavailable);
    }
    const std::lock_guard hold(index_.lock);
    index_.index.clear();
    suspected_.clear();  // it was not they
    begin_waiting();
}

// What a probe does not see fails again and again: each time it is left alone for longer.
void Device::begin_waiting() {
    const Instant now = terms_.now();
    const bool is_again = now - ready_since_ < kLongestDelay;
    const std::chrono::milliseconds longest = std::max<std::chrono::milliseconds>(kLongestDelay, terms_.probe_interval);
    delay_ = is_again ? std::clamp(2 * delay_, terms_.probe_interval, longest) : terms_.probe_interval;
    next_probe_ = now + delay_;
}

void Device::told_read(std::uint32_t segment, int error) {
    counts_.io_errors += error == 0 ? 0 : 1;
    if (!is_reading()) {
        return;
    }
    if (error == 0) {
        failed_reads_ = 0;
    } else if (error == ENODATA) {
        const std::lock_guard hold(index_.lock);  // it was cut short by somebody else: nothing in it is to be trusted
        index_.index.drop_segment(segment);
    } else if (!is_of_the_medium(error)) {
        count_failed_read(segment, error);
    }
}

void Device::count_failed_read(std::uint32_t segment, int error) {
    if (++failed_reads_ >= kFailedReadLimit) {
        read_problem_ =
            "disk folder " + terms_.path + ": reads fail: " + system_fault(segment_file_name(segment), error).message();
    }
}

void Device::publish() {
    DeviceHealth health;
    health.state = state_;
    health.reason = reason_;
    health.io_engine = runner_.queue().engine_name();
    health.capacity_bytes = segments_.size() * terms_.segment_bytes;
    health.counts = counts_;
    health.segments = file_count_;
    health.live_bytes = index_.index.live_bytes();
    health.records = index_.index.size();
    health.index_bytes = index_.index.memory_bytes();
    const std::lock_guard hold(health_lock_);
    health_ = std::move(health);
}

}  // namespace kvo
