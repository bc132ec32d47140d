// Device: its folder's coming and going.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "disk/device.hpp"
#include "shim/system_fault.hpp"

namespace kvo {
namespace {

constexpr std::uint32_t kFailedReadLimit = 8;  // in a row, until the device is taken for gone
constexpr std::uint32_t kUnreadableLimit = 8;  // segments, likewise

}  // namespace

void Device::look_after(Instant now) {
    if (const std::string problem = condition_.take_read_problem(); !problem.empty()) {
        become_absent(problem);
    }
    if (const std::string problem = condition_.take_write_problem(); !problem.empty()) {
        become_read_only(problem);
    }
    if (now < condition_.next_probe()) {
        return;
    }
    const DeviceState state = condition_.state();
    if (state == DeviceState::opening || state == DeviceState::absent) {
        open();
    } else if (const Status status = files_.check(); !status.ok()) {
        become_absent(status.message());
    } else if (state == DeviceState::read_only) {
        const Status probed = files_.try_writing();
        condition_.set(probed.ok() ? DeviceState::ready : DeviceState::read_only, probed.message());
    } else {
        files_.expect_room(now);
    }
    condition_.probe_next();
}

void Device::open() {
    const bool is_quiet = runner_.queue().pending() == runner_.queue().held() && sealing_.empty();
    if (!is_quiet) {
        return;  // the files stay open under what is still to be done with them
    }
    if (reader_) {
        reader_->give_up(DiskOutcome::unavailable);
    }
    reader_.reset();
    if (const Status status = files_.open(); !status.ok()) {
        condition_.set(DeviceState::absent, status.message());
        return;
    }
    if (const Status status = recover(); !status.ok()) {
        become_absent(status.message());
        return;
    }
    failed_reads_ = 0;
    reader_ = std::make_unique<DeviceReader>(
        ReaderSeat{[this](std::uint32_t segment, int error) { told_read(segment, error); },
                   [this](const LostRecord& record, int error) { told_lost(record, error); }},
        terms_, runner_, read_pool_, files_.table(), index_, counts_, coding_);
    condition_.set(DeviceState::ready, {});
}

Status Device::recover() {
    const Instant begun = terms_.now();
    const Result<std::vector<std::uint32_t>> numbers = files_.list();
    if (!numbers.ok()) {
        return numbers.fault();
    }
    std::vector<std::pair<std::uint32_t, FoundSegment>> found;
    std::vector<std::uint32_t> unreadable;
    std::uint32_t dropped = 0;
    for (const std::uint32_t number : numbers.value()) {
        if (const Status opened = files_.open_file(number); !opened.ok()) {
            if (opened.code() != Code::unavailable) {
                return opened;
            }
            ++dropped;
            if (const Status removed = files_.remove_file(number); !removed.ok()) {
                return removed;
            }
            continue;
        }
        int error = 0;
        auto one = find_readable(files_[number].file.number(), error);
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
        static_cast<void>(files_.remove_file(number));
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
    auto found = find_segment(read, files_.store(), terms_.segment_bytes, terms_.record_limit_bytes);
    if (found) {
        found->is_whole = error == 0;
    }
    return found;
}

void Device::adopt_segment(std::uint32_t number, FoundSegment found) {
    files_.go_on_with_life(number, found.life);
    SegmentFile& segment = files_[number];
    // One that could not be read everywhere gets none: there may be more in it.
    segment.has_footer = found.has_footer || (found.is_whole && write_footer(number, found));
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
    const int file = files_[number].file.number();
    files_.spend(bytes);
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

void Device::become_read_only(const std::string& reason) {
    if (condition_.state() == DeviceState::ready) {
        condition_.set(DeviceState::read_only, reason);
        drop_writers(DiskOutcome::failed);
        condition_.probe_later();
    }
}

void Device::become_absent(const std::string& reason) {
    condition_.set(DeviceState::absent, reason);
    drop_writers(DiskOutcome::unavailable);
    if (reader_) {
        reader_->give_up(DiskOutcome::unavailable);
    }
    const std::lock_guard hold(index_.lock);
    index_.index.clear();
    suspected_.clear();  // it was not they
    condition_.probe_later();
}

void Device::told_read(std::uint32_t segment, int error) {
    counts_.io_errors += error == 0 ? 0 : 1;
    if (!condition_.is_reading()) {
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
        condition_.note_read_problem("disk folder " + terms_.path +
                                     ": reads fail: " + system_fault(segment_file_name(segment), error).message());
    }
}

void Device::publish() {
    DeviceHealth health;
    health.io_engine = runner_.queue().engine_name();
    health.capacity_bytes = segment_count() * terms_.segment_bytes;
    health.counts = counts_;
    health.segments = files_.file_count();
    health.live_bytes = index_.index.live_bytes();
    health.records = index_.index.size();
    health.index_bytes = index_.index.memory_bytes();
    condition_.publish(std::move(health));
}

}  // namespace kvo
