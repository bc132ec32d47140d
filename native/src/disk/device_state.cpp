// Device: its folder's coming and going.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "disk/device.hpp"
#include "disk/device_recovery.hpp"
#include "disk/segment_io.hpp"
#include "shim/system_fault.hpp"

namespace kvo {
namespace {

constexpr std::uint32_t kFailedReadLimit = 8;  // in a row, until the device is taken for gone

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
    const SegmentIo io(terms_, runner_, files_, counts_);
    if (const Status status = DeviceRecovery(terms_, files_, io, index_, counts_).run(); !status.ok()) {
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
