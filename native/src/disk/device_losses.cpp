#include "disk/device_losses.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include "base/status.hpp"

namespace kvo {
namespace {

constexpr std::size_t kMostLost = 4096;  // that wait to be written; what is beyond is found lost again
constexpr std::chrono::seconds kTimeout{60};
constexpr std::uint32_t kFailedReadLimit = 8;  // in a row, until the device is taken for gone

}  // namespace

void DeviceLosses::told_read(std::uint32_t segment, int error) {
    seat_.counts.io_errors += error == 0 ? 0 : 1;
    if (!seat_.condition.is_reading()) {
        return;
    }
    if (error == 0) {
        failed_reads_ = 0;
    } else if (error == ENODATA) {
        // Another program truncated the file, so none of its records can be trusted.
        const std::lock_guard hold(seat_.index.lock);
        seat_.index.index.drop_segment(segment);
    } else if (!is_of_the_medium(error)) {
        count_failed_read(segment, error);
    }
}

void DeviceLosses::count_failed_read(std::uint32_t segment, int error) {
    if (++failed_reads_ >= kFailedReadLimit) {
        seat_.condition.note_read_problem("disk folder " + seat_.terms.path +
                                          ": reads fail: " + system_fault(segment_file_name(segment), error).message());
    }
}

void DeviceLosses::told_lost(const LostRecord& record, int error) {
    if (error == 0) {
        ++seat_.counts.damaged_records;
        forget(record);
        note(record);
    } else if (seat_.condition.is_reading() && suspected_.size() < kMostLost) {
        forget(record);
        suspected_.push_back(record);
        read_something_else(record.place.segment);
    }
}

void DeviceLosses::told_left_out(const BatchPointer& batch, std::uint32_t item) {
    if (batch != batch_) {
        note({batch->item(item).key, {}, 0});
    }
}

void DeviceLosses::note(const LostRecord& record) {
    if (lost_.size() < kMostLost) {
        lost_.push_back(record);
    }
}

// Until that succeeds, or has failed so often that the device is taken for gone.
void DeviceLosses::read_something_else(std::uint32_t segment) {
    Result<AlignedMemory> made = AlignedMemory::create(kHeadBytes);
    if (is_asking_ || !made.ok()) {
        return;
    }
    is_asking_ = true;
    const auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    const int file = seat_.files[segment].file.number();
    static_cast<void>(posix_fadvise(file, 0, kHeadBytes, POSIX_FADV_DONTNEED));  // of the device, not of a cache
    seat_.runner.run(
        {IoKind::read, file, 0, memory->start(), kHeadBytes, 0}, seat_.terms.now() + seat_.terms.io_timeout,
        [this, segment, suspects = suspected_.size()](int error) {
            is_asking_ = false;
            if (!seat_.condition.is_reading()) {
                return;
            }
            told_read(segment, error);
            if (error == 0) {
                confirm(suspects);
            } else if (is_of_the_medium(error)) {
                count_failed_read(segment, error);
            }
            const bool says_nothing = error == ENODATA;  // that file is cut short
            if (!says_nothing && !suspected_.empty() && seat_.condition.is_reading()) {
                read_something_else(segment);
            }
        },
        [memory] {});
}

// Those that were suspected before something else was asked for.
void DeviceLosses::confirm(std::size_t count) {
    const auto behind = suspected_.begin() + static_cast<std::ptrdiff_t>(std::min(count, suspected_.size()));
    seat_.counts.unreadable_records += static_cast<std::uint64_t>(behind - suspected_.begin());
    std::for_each(suspected_.begin(), behind, [this](const LostRecord& record) { note(record); });
    suspected_.erase(suspected_.begin(), behind);
}

void DeviceLosses::forget(const LostRecord& record) {
    if (seat_.files[record.place.segment].life.generation == record.generation) {
        const std::lock_guard hold(seat_.index.lock);
        seat_.index.index.erase_at(mark_of(record.key), record.place);
    }
}

void DeviceLosses::pump() {
    if (batch_ && !batch_->has_ended()) {
        return;
    }
    if (const BatchPointer batch = std::exchange(batch_, nullptr)) {
        std::vector<LostRecord> left;
        for (std::size_t i = 0; i < lost_.size(); ++i) {
            if (i >= batch->size() || batch->item(i).outcome != DiskOutcome::removed) {
                left.push_back(lost_[i]);
            }
        }
        lost_ = std::move(left);
        return;
    }
    if (lost_.empty() || !seat_.condition.can_write()) {
        return;
    }
    batch_ = std::make_shared<DiskBatch>(DiskVerb::remove, lost_.size(), seat_.terms.now() + kTimeout);
    batch_->is_move = true;
    for (std::size_t i = 0; i < lost_.size(); ++i) {
        forget(lost_[i]);  // the folder may have been opened again since
        batch_->item(i).key = lost_[i].key;
    }
    seat_.give(batch_);
}

}  // namespace kvo
