// Device: records that it has lost. What says so is written as well, or they would be back after a restart.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "disk/device.hpp"

namespace kvo {
namespace {

constexpr std::size_t kMostLost = 4096;  // that wait to be written; what is beyond is found lost again
constexpr std::chrono::seconds kTimeout{60};

}  // namespace

// What was damaged is lost. What could not be read is once something else can: else it is the device that has gone.
void Device::told_lost(const LostRecord& record, int error) {
    if (error == 0) {
        ++counts_.damaged_records;
        forget_lost(record);
        note_lost(record);
    } else if (condition_.is_reading() && suspected_.size() < kMostLost) {
        forget_lost(record);
        suspected_.push_back(record);
        read_something_else(record.place.segment);
    }
}

void Device::note_lost(const LostRecord& record) {
    if (lost_.size() < kMostLost) {
        lost_.push_back(record);
    }
}

// Until that succeeds, or has failed so often that the device is taken for gone.
void Device::read_something_else(std::uint32_t segment) {
    Result<AlignedMemory> made = AlignedMemory::create(kHeadBytes);
    if (is_asking_ || !made.ok()) {
        return;
    }
    is_asking_ = true;
    const auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    const int file = files_[segment].file.number();
    static_cast<void>(posix_fadvise(file, 0, kHeadBytes, POSIX_FADV_DONTNEED));  // of the device, not of a cache
    runner_.run(
        {IoKind::read, file, 0, memory->start(), kHeadBytes, 0}, terms_.now() + terms_.io_timeout,
        [this, segment, suspects = suspected_.size()](int error) {
            is_asking_ = false;
            if (!condition_.is_reading()) {
                return;
            }
            told_read(segment, error);
            if (error == 0) {
                confirm_lost(suspects);
            } else if (is_of_the_medium(error)) {
                count_failed_read(segment, error);
            }
            const bool says_nothing = error == ENODATA;  // that file is cut short
            if (!says_nothing && !suspected_.empty() && condition_.is_reading()) {
                read_something_else(segment);
            }
        },
        [memory] {});
}

// Those that were suspected before something else was asked for.
void Device::confirm_lost(std::size_t count) {
    const auto behind = suspected_.begin() + static_cast<std::ptrdiff_t>(std::min(count, suspected_.size()));
    counts_.unreadable_records += static_cast<std::uint64_t>(behind - suspected_.begin());
    std::for_each(suspected_.begin(), behind, [this](const LostRecord& record) { note_lost(record); });
    suspected_.erase(suspected_.begin(), behind);
}

void Device::forget_lost(const LostRecord& record) {
    if (files_[record.place.segment].life.generation == record.generation) {
        const std::lock_guard hold(index_.lock);
        index_.index.erase_at(mark_of(record.key), record.place);
    }
}

// A batch at a time; what is not written is kept for the next one.
void Device::pump_losses() {
    if (loss_batch_ && !loss_batch_->has_ended()) {
        return;
    }
    if (const BatchPointer batch = std::exchange(loss_batch_, nullptr)) {
        std::vector<LostRecord> left;
        for (std::size_t i = 0; i < lost_.size(); ++i) {
            if (i >= batch->size() || batch->item(i).outcome != DiskOutcome::removed) {
                left.push_back(lost_[i]);
            }
        }
        lost_ = std::move(left);
        return;
    }
    if (lost_.empty() || !condition_.can_write()) {
        return;
    }
    loss_batch_ = std::make_shared<DiskBatch>(DiskVerb::remove, lost_.size(), terms_.now() + kTimeout);
    loss_batch_->is_move = true;
    for (std::size_t i = 0; i < lost_.size(); ++i) {
        forget_lost(lost_[i]);  // the folder may have been opened anew
        loss_batch_->item(i).key = lost_[i].key;
    }
    add_all(loss_batch_);
}

}  // namespace kvo
