// Device: records that it has lost. What says so is written as well, or they would be back after a restart.
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
    forget_lost(record);
    std::vector<LostRecord>& records = error == 0 ? lost_ : suspected_;
    if (records.size() < kMostLost) {
        records.push_back(record);
    }
    if (error == 0) {
        ++counts_.damaged_records;
    } else {
        read_something_else(record.place.segment);
    }
}

// Until a read succeeds, or so many have failed that the device is taken for gone.
void Device::read_something_else(std::uint32_t segment) {
    Result<AlignedMemory> made = AlignedMemory::create(kHeadBytes);
    if (is_asking_ || !made.ok()) {
        return;
    }
    is_asking_ = true;
    const auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    runner_.run(
        {IoKind::read, segments_[segment].file.number(), 0, memory->start(), kHeadBytes, 0},
        terms_.now() + terms_.io_timeout,
        [this, segment](int error) {
            is_asking_ = false;
            told_read(segment, error);
            const bool says_nothing = error == ENODATA;  // that file is cut short
            if (!says_nothing && !suspected_.empty() && read_problem_.empty()) {
                read_something_else(segment);
            }
        },
        [memory] {});
}

void Device::confirm_lost() {
    const std::size_t room = kMostLost - std::min(kMostLost, lost_.size());
    lost_.insert(lost_.end(), suspected_.begin(),
                 suspected_.begin() + static_cast<std::ptrdiff_t>(std::min(room, suspected_.size())));
    counts_.unreadable_records += suspected_.size();
    suspected_.clear();
}

void Device::forget_lost(const LostRecord& record) {
    if (segments_[record.place.segment].life.generation == record.generation) {
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
    if (lost_.empty() || !can_write()) {
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
