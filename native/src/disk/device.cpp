#include "disk/device.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "disk/segment_io.hpp"
#include "io/make_engine.hpp"

namespace kvo {

Device::Device(DeviceTerms terms, std::unique_ptr<IoEngine> engine, AlignedMemory read_memory,
               AlignedMemory write_memory)
    : terms_(std::move(terms)),
      runner_(std::move(engine), terms_.write_depth),
      read_pool_(std::move(read_memory), terms_.read_piece_bytes),
      write_pool_(std::move(write_memory), terms_.write_buffer_bytes),
      condition_(terms_),
      files_(terms_, counts_),
      index_(static_cast<std::uint32_t>(terms_.capacity_bytes / terms_.segment_bytes)),
      moves_allowed_(terms_.move_share, terms_.segment_bytes),
      coding_(terms_.coding) {}

Device::~Device() {
    if (!runner_.close(0)) {
        read_pool_.abandon();
        write_pool_.abandon();
    }
}

Result<std::unique_ptr<Device>> Device::create(DeviceTerms terms) {
    if (Status status = check_terms(terms); !status.ok()) {
        return status;
    }
    std::unique_ptr<IoEngine> engine;
    if (terms.make_engine) {
        Result<std::unique_ptr<IoEngine>> made = terms.make_engine();
        if (!made.ok()) {
            return made.fault();
        }
        engine = std::move(made.value());
    } else {
        Result<MadeEngine> made = make_io_engine(terms.io_engine, terms.io_depth);
        if (!made.ok()) {
            return made.fault();
        }
        engine = std::move(made.value().engine);
    }
    // For the largest record, beside what is on its way to the device and the buffer that is being filled.
    const std::size_t write_buffers =
        record_footprint(terms.record_limit_bytes) / terms.write_buffer_bytes + 2 + 2 * terms.write_depth;
    Result<AlignedMemory> read_memory = AlignedMemory::create(terms.read_buffers * terms.read_piece_bytes);
    Result<AlignedMemory> write_memory = AlignedMemory::create(write_buffers * terms.write_buffer_bytes);
    if (!read_memory.ok() || !write_memory.ok()) {
        return (read_memory.ok() ? write_memory : read_memory).fault();
    }
    return std::unique_ptr<Device>(new Device(std::move(terms), std::move(engine), std::move(read_memory.value()),
                                              std::move(write_memory.value())));
}

bool Device::contains(const KeyMark& mark) {
    const std::lock_guard hold(index_.lock);
    return index_.index.find(mark).has_value();
}

void Device::add(DevicePart part) {
    const bool is_get = part.batch->verb == DiskVerb::get;
    if (is_get && condition_.can_read()) {
        reader_->add(part.batch, part.items);
    } else if (!is_get && condition_.can_write()) {
        (part.batch->is_move ? moves_ : puts_).parts.push_back(std::move(part));
    } else {
        for (const std::uint32_t item : part.items) {
            part.batch->end(item, DiskOutcome::unavailable);
        }
    }
}

void Device::add_all(const BatchPointer& batch) {
    std::vector<std::uint32_t> items(batch->size());
    std::iota(items.begin(), items.end(), 0);
    add({batch, std::move(items)});
}

Instant Device::step() {
    const Instant now = terms_.now();
    runner_.poll(now);
    look_after(now);
    if (reader_) {
        reader_->pump();
    }
    pump_losses();
    pump_eviction();
    pump_writes();
    for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
        writer->maintain(now);
    }
    if (writer_) {
        writer_->maintain(now);
    }
    end_writers();
    const bool has_ended = runner_.poll(now) > 0;  // and what was asked for in this step begins in this step
    publish();
    if (has_ended || coded_in_step_ >= kCodedBytesAStep) {
        return now;
    }
    Instant wake = std::min(condition_.next_probe(), runner_.queue().next_deadline());
    wake = std::min(wake, writer_ ? writer_->next_wake() : Instant::max());
    for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
        wake = std::min(wake, writer->next_wake());
    }
    return mover_ || leaving_ ? std::min(wake, now + std::chrono::milliseconds(1)) : wake;
}

bool Device::close(int timeout_ms) {
    const Instant end = terms_.now() + std::chrono::milliseconds(timeout_ms);
    // What came last is written, too, as far as there are buffers; coding it may take more than a step.
    while (coded_in_step_ >= kCodedBytesAStep && condition_.can_write() && terms_.now() < end) {
        pump_writes();
    }
    condition_.end();
    give_up(puts_, DiskOutcome::unavailable);
    give_up(moves_, DiskOutcome::unavailable);
    mover_.reset();
    if (reader_) {
        reader_->give_up(DiskOutcome::unavailable);
    }
    if (writer_) {
        writer_->seal();
        sealing_.push_back(std::move(writer_));
    }
    while (!sealing_.empty() && terms_.now() < end) {
        const Instant now = terms_.now();
        runner_.poll(now);
        for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
            writer->maintain(now);
        }
        end_writers();
        if (runner_.poll(now) == 0 && !sealing_.empty()) {
            wait_readable(file(), 10);
        }
    }
    const bool is_over = runner_.close(static_cast<int>(
        std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(end - terms_.now()).count())));
    for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
        writer->give_up(DiskOutcome::failed);
    }
    if (is_over) {
        files_.close();
    }
    return is_over;
}

std::vector<FooterEntry> Device::list_segment(std::uint32_t number) {
    if (!condition_.can_read() || number >= segment_count()) {
        return {};
    }
    std::vector<FooterEntry> entries;
    const SegmentFile& segment = files_[number];
    if (segment.state == SegmentState::writing) {
        if (writer_ && writer_->segment() == number) {
            entries = writer_->entries();
        }
        for (const std::unique_ptr<SegmentWriter>& writer : sealing_) {
            entries = writer->segment() == number ? writer->entries() : entries;
        }
    } else if (segment.state == SegmentState::full || segment.state == SegmentState::leaving) {
        int error = 0;
        if (auto found = SegmentIo(terms_, runner_, files_, counts_).find(number, error)) {
            entries = std::move(found->entries);
        }
    }
    const std::lock_guard hold(index_.lock);
    std::erase_if(entries, [&](const FooterEntry& entry) {
        const RecordPlace place = place_of(number, entry);
        const std::optional<RecordPlace> known = index_.index.find(mark_of(entry.key));
        return entry.flag != RecordFlag::none || !known || !(*known == place);
    });
    return entries;
}

}  // namespace kvo
