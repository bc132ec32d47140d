// Device: records on their way to a segment.
#include <algorithm>
#include <utility>

#include "disk/device.hpp"

namespace kvo {
namespace {

constexpr std::size_t kSealingLimit = 3;  // segments that are not durable beside the open one

}  // namespace

void Device::pump_writes() {
    coded_in_step_ = 0;
    pump(moves_);
    pump(puts_);
}

// Until something must wait: for a buffer, or for a segment to be empty.
void Device::pump(WriteQueue& queue) {
    while (!queue.parts.empty() && condition_.is_writing()) {
        const DevicePart& part = queue.parts.front();
        for (; queue.next < part.items.size(); ++queue.next) {
            if (coded_in_step_ >= kCodedBytesAStep) {
                return;  // reads go first
            }
            const std::uint32_t item = part.items[queue.next];
            const bool is_removal = part.batch->verb == DiskVerb::remove;
            const bool is_done = is_end(part.batch->item(item).outcome) ||
                                 (is_removal ? write_removal(part.batch, item) : write_item(part.batch, item));
            if (!is_done) {
                return;
            }
        }
        queue.parts.pop_front();
        queue.next = 0;
    }
}

void Device::give_up(WriteQueue& queue, DiskOutcome outcome) {
    for (const DevicePart& part : std::exchange(queue.parts, {})) {
        for (const std::uint32_t item : part.items) {
            // Those in front of `next` are the writers'.
            if (queue.next == 0) {
                part.batch->end(item, outcome);
            } else {
                --queue.next;
            }
        }
    }
    queue.next = 0;
}

// False: it must wait.
bool Device::write_item(const BatchPointer& batch, std::uint32_t number) {
    const DiskItem& item = batch->item(number);
    const std::uint64_t footprint = record_footprint(item.length);
    const bool is_too_large = item.length > terms_.record_limit_bytes ||
                              kHeadBytes + round_up(footprint, kIoAlignment) + footer_bytes(1) > terms_.segment_bytes;
    if (batch->deadline <= terms_.now() || is_too_large) {
        batch->end(number, is_too_large ? DiskOutcome::too_large : DiskOutcome::late);
        return true;
    }
    std::unique_lock hold(index_.lock);
    const std::optional<RecordPlace> place = index_.index.find(mark_of(item.key));
    hold.unlock();
    if (batch->is_move && !place) {
        batch->end(number, DiskOutcome::missing);  // removed while it was on its way
        return true;
    }
    if (!batch->is_move && place && place->length == item.length) {
        return end_present(batch, number, *place);
    }
    if (!batch->is_move && !files_.may_spend(footprint)) {
        ++counts_.over_budget_records;
        batch->end(number, DiskOutcome::over_budget);
        return true;
    }
    if (!has_writer_for(item.length, batch->is_move)) {
        return batch->is_move && end_without_room(batch, number);
    }
    if (!batch->claim(number)) {
        return true;
    }
    if (!writer_->append(batch, number, code(item))) {
        ++counts_.damaged_records;
        batch->end(number, DiskOutcome::damaged);
        return true;
    }
    batch->release(number);
    (batch->is_move ? counts_.moved_bytes : counts_.put_bytes) += item.length;
    counts_.put_records += batch->is_move ? 0 : 1;
    if (!batch->is_move) {
        moves_allowed_.add_put(item.length);
    }
    return true;
}

// Empty: it is written as it is.
std::span<const std::uint8_t> Device::code(const DiskItem& item) {
    if (!coding_.wants(item.key.group)) {
        return {};
    }
    const std::span record(reinterpret_cast<const std::uint8_t*>(item.address), item.length);
    const std::span<const std::uint8_t> coded = encoder_.encode(record);
    coded_in_step_ += item.length;
    coding_.told_coded(item.key.group, item.length, coded.empty() ? item.length : coded.size());
    if (!coded.empty() && coding_.needs_trial()) {
        std::vector<std::uint8_t> scratch(record.size());
        const Instant begun = terms_.now();
        static_cast<void>(decode_record(coded, scratch));
        coding_.told_decoded(record.size(), terms_.now() - begun);
    }
    if (!coded.empty()) {
        ++counts_.coded_records;
        counts_.coded_bytes += item.length;
        counts_.coded_stored_bytes += coded.size();
    }
    return coded;
}

bool Device::end_present(const BatchPointer& batch, std::uint32_t item, const RecordPlace& place) {
    const auto writes_it = [&](const std::unique_ptr<SegmentWriter>& writer) {
        return writer && writer->segment() == place.segment && !writer->has_failed() &&
               place.offset >= writer->durable_end();
    };
    const auto sealing = std::ranges::find_if(sealing_, writes_it);
    if (!batch->wants_durable || (!writes_it(writer_) && sealing == sealing_.end())) {
        batch->end(item, batch->wants_durable ? DiskOutcome::durable : DiskOutcome::written);
    } else {
        (writes_it(writer_) ? writer_ : *sealing)->await_durable(batch, item);
    }
    return true;
}

bool Device::write_removal(const BatchPointer& batch, std::uint32_t number) {
    const KeyMark mark = mark_of(batch->item(number).key);
    std::unique_lock hold(index_.lock);
    const bool is_there = index_.index.find(mark).has_value();
    hold.unlock();
    const bool is_written_again = is_there || is_appended(mark);
    if (batch->is_move ? is_written_again : !is_there) {
        batch->end(number, batch->is_move ? DiskOutcome::removed : DiskOutcome::missing);
        return true;
    }
    if (!has_writer_for(0, batch->is_move)) {
        const bool is_over = batch->is_move && end_without_room(batch, number);
        if (is_over && batch != loss_batch_) {
            note_lost({batch->item(number).key, {}, 0});  // it goes with its segment, and is written to the next one
        }
        return is_over;
    }
    hold.lock();
    index_.index.erase(mark);
    hold.unlock();
    writer_->append_removal(batch, number);
    return true;
}

// False: there is room, and it must wait for a buffer.
bool Device::end_without_room(const BatchPointer& batch, std::uint32_t item) {
    const bool has_no_room = !writer_ && files_.empty_count() == 0;
    if (has_no_room) {
        batch->end(item, DiskOutcome::failed);  // it goes with its segment, rather than hold it
    }
    return has_no_room;
}

bool Device::is_appended(const KeyMark& mark) const {
    const auto has_it = [&mark](const std::unique_ptr<SegmentWriter>& writer) {
        return writer && writer->has_appended(mark);
    };
    return has_it(writer_) || std::ranges::any_of(sealing_, has_it);
}

bool Device::has_writer_for(std::uint64_t length, bool is_move) {
    // What is left of the last segment is for the moves by which there will be another.
    if (!is_move && mover_ && files_.empty_count() == 0) {
        return false;
    }
    if (writer_ && !writer_->has_room(length)) {
        writer_->seal();
        sealing_.push_back(std::move(writer_));
    }
    if (!writer_ && !begin_segment(is_move)) {
        return false;
    }
    return writer_->has_buffers(length);
}

// The last empty segment is for moves, by which the others get theirs.
bool Device::begin_segment(bool is_move) {
    if (sealing_.size() >= kSealingLimit || files_.empty_count() < (is_move ? 1 : 2) || write_pool_.free_count() == 0) {
        return false;
    }
    const Result<std::uint32_t> empty = files_.find_empty();
    if (!empty.ok()) {
        if (empty.fault().code() != Code::unavailable) {
            condition_.note_write_problem(empty.fault().message());
        }
        return false;
    }
    begin_writer(empty.value());
    return true;
}

void Device::begin_writer(std::uint32_t number) {
    files_.begin_life(number);
    const SegmentFile& segment = files_[number];
    WriterSeat seat;
    seat.segment = number;
    seat.file = segment.file.number();
    seat.life = segment.life;
    seat.written = [this](const AppendedRecord& record) { told_written(record); };
    seat.durable = [](const AppendedRecord& record) {
        if (record.batch) {
            record.batch->end(record.item,
                              record.flag == RecordFlag::removal ? DiskOutcome::removed : DiskOutcome::durable);
        }
    };
    seat.spent = [this](std::uint64_t bytes) { files_.spend(bytes); };
    seat.failed = [this, number](const std::string& what) { told_failed(number, what); };
    writer_ = std::make_unique<SegmentWriter>(std::move(seat), terms_, runner_, write_pool_);
}

void Device::told_written(const AppendedRecord& record) {
    {
        const std::lock_guard hold(index_.lock);
        const bool is_there = index_.index.find(record.mark).has_value();
        if (record.flag == RecordFlag::removal) {
            if (!record.batch->is_move) {
                index_.index.erase(record.mark);
            }
        } else if (!record.batch->is_move || is_there) {
            index_.index.put(record.mark, record.place);
        }
    }
    files_[record.place.segment].removals += record.flag == RecordFlag::removal ? 1 : 0;
    if (!record.batch->wants_durable) {
        record.batch->end(record.item,
                          record.flag == RecordFlag::removal ? DiskOutcome::removed : DiskOutcome::written);
    }
}

// Whether what was written since the last good fdatasync is there nobody knows any more.
void Device::told_failed(std::uint32_t segment, const std::string& what) {
    ++counts_.io_errors;
    const auto writes_it = [segment](const std::unique_ptr<SegmentWriter>& writer) {
        return writer && writer->segment() == segment;
    };
    const SegmentWriter& writer = writes_it(writer_) ? *writer_ : **std::ranges::find_if(sealing_, writes_it);
    {
        const std::lock_guard hold(index_.lock);
        index_.index.drop_segment(segment, writer.durable_end());
    }
    condition_.note_write_problem("disk folder " + terms_.path + ": " + segment_file_name(segment) + ": " + what);
}

// Nothing is written any more. What is not durable yet goes with its writer; what is stays readable.
void Device::drop_writers(DiskOutcome outcome) {
    give_up(puts_, DiskOutcome::unavailable);
    give_up(moves_, DiskOutcome::unavailable);
    mover_.reset();
    if (leaving_) {
        files_[*std::exchange(leaving_, std::nullopt)].state = SegmentState::full;
    }
    if (writer_) {
        sealing_.push_back(std::move(writer_));
    }
    for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
        if (!writer->has_failed()) {
            writer->give_up(outcome);
        }
    }
}

void Device::end_writers() {
    std::erase_if(sealing_, [this](const std::unique_ptr<SegmentWriter>& writer) {
        if (!writer->is_done()) {
            return false;
        }
        SegmentFile& segment = files_[writer->segment()];
        segment.state = SegmentState::full;
        segment.has_footer = writer->has_footer() && !writer->has_failed();
        return true;
    });
}

}  // namespace kvo
