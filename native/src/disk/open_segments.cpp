#include "disk/open_segments.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

namespace kvo {
namespace {

constexpr std::size_t kSealingLimit = 3;  // segments that may wait to become durable, not counting the open one

}  // namespace

OpenSegments::OpenSegments(const OpenSeat& seat, AlignedMemory memory)
    : seat_(seat), pool_(std::move(memory), seat.terms.write_buffer_bytes) {}

bool OpenSegments::make_room(std::uint64_t length, bool is_move) {
    if (writer_ && !writer_->has_room(length)) {
        seal();
    }
    if (!writer_ && !begin(is_move)) {
        return false;
    }
    return writer_->has_buffers(length);
}

bool OpenSegments::begin(bool is_move) {
    if (sealing_.size() >= kSealingLimit || seat_.files.empty_count() < (is_move ? 1 : 2) || pool_.free_count() == 0) {
        return false;
    }
    const Result<std::uint32_t> empty = seat_.files.find_empty();
    if (!empty.ok()) {
        if (empty.fault().code() != Code::unavailable) {
            seat_.condition.note_write_problem(empty.fault().message());
        }
        return false;
    }
    begin_writer(empty.value());
    return true;
}

void OpenSegments::begin_writer(std::uint32_t number) {
    seat_.files.begin_life(number);
    const SegmentFile& segment = seat_.files[number];
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
    seat.spent = [this](std::uint64_t bytes) { seat_.files.spend(bytes); };
    seat.failed = [this, number](const std::string& what) { told_failed(number, what); };
    writer_ = std::make_unique<SegmentWriter>(std::move(seat), seat_.terms, seat_.runner, pool_);
}

void OpenSegments::told_written(const AppendedRecord& record) {
    {
        const std::lock_guard hold(seat_.index.lock);
        const bool is_there = seat_.index.index.find(record.mark).has_value();
        if (record.flag == RecordFlag::removal) {
            if (!record.batch->is_move) {
                seat_.index.index.erase(record.mark);
            }
        } else if (!record.batch->is_move || is_there) {
            seat_.index.index.put(record.mark, record.place);
        }
    }
    seat_.files[record.place.segment].removals += record.flag == RecordFlag::removal ? 1 : 0;
    if (!record.batch->wants_durable) {
        record.batch->end(record.item,
                          record.flag == RecordFlag::removal ? DiskOutcome::removed : DiskOutcome::written);
    }
}

// Records that were written since the last successful fdatasync may be missing on the device, so the index drops them.
void OpenSegments::told_failed(std::uint32_t segment, const std::string& what) {
    ++seat_.counts.io_errors;
    const std::uint64_t durable_end = writer_of(segment)->durable_end();
    {
        const std::lock_guard hold(seat_.index.lock);
        seat_.index.index.drop_segment(segment, durable_end);
    }
    seat_.condition.note_write_problem("disk folder " + seat_.terms.path + ": " + segment_file_name(segment) + ": " +
                                       what);
}

const SegmentWriter* OpenSegments::writer_of(std::uint32_t segment) const {
    if (writer_ && writer_->segment() == segment) {
        return writer_.get();
    }
    const auto sealing = std::ranges::find(sealing_, segment, [](const auto& writer) { return writer->segment(); });
    return sealing == sealing_.end() ? nullptr : sealing->get();
}

bool OpenSegments::has_appended(const KeyMark& mark) const {
    const auto has_it = [&mark](const std::unique_ptr<SegmentWriter>& writer) {
        return writer && writer->has_appended(mark);
    };
    return has_it(writer_) || std::ranges::any_of(sealing_, has_it);
}

void OpenSegments::end_present(const BatchPointer& batch, std::uint32_t item, const RecordPlace& place) {
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
}

std::vector<FooterEntry> OpenSegments::entries(std::uint32_t segment) const {
    const SegmentWriter* const writer = writer_of(segment);
    return writer ? writer->entries() : std::vector<FooterEntry>();
}

void OpenSegments::maintain(Instant now) {
    for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
        writer->maintain(now);
    }
    if (writer_) {
        writer_->maintain(now);
    }
    std::erase_if(sealing_, [this](const std::unique_ptr<SegmentWriter>& writer) {
        if (!writer->is_done()) {
            return false;
        }
        SegmentFile& segment = seat_.files[writer->segment()];
        segment.state = SegmentState::full;
        segment.has_footer = writer->has_footer() && !writer->has_failed();
        return true;
    });
}

Instant OpenSegments::next_wake() const {
    Instant wake = writer_ ? writer_->next_wake() : Instant::max();
    for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
        wake = std::min(wake, writer->next_wake());
    }
    return wake;
}

void OpenSegments::seal() {
    if (writer_) {
        writer_->seal();
        sealing_.push_back(std::move(writer_));
    }
}

void OpenSegments::drop(DiskOutcome outcome) {
    if (writer_) {
        sealing_.push_back(std::move(writer_));
    }
    for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
        if (!writer->has_failed()) {
            writer->give_up(outcome);
        }
    }
}

}  // namespace kvo
