#include "disk/segment_writer.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "base/status.hpp"

namespace kvo {

SegmentWriter::SegmentWriter(WriterSeat seat, const DeviceTerms& terms, IoRunner& runner, BufferPool& buffers)
    : seat_(std::move(seat)), terms_(terms), runner_(runner), pool_(buffers), last_sync_(terms.now()) {
    buffers_.push_back({pool_.take(), 0});
    const SegmentHead head = make_segment_head(seat_.life, terms_.segment_bytes);
    copy_in(0, reinterpret_cast<const std::uint8_t*>(&head), sizeof head);
}

bool SegmentWriter::has_room(std::uint64_t length) const {
    const std::uint64_t end = round_up(position_ + record_footprint(length), kIoAlignment);
    return !is_sealing_ && end + footer_bytes(entries_.size() + 1) <= terms_.segment_bytes;
}

std::size_t SegmentWriter::buffers_missing(std::uint64_t length) const {
    const std::uint64_t covered = buffers_.empty() ? position_ : buffers_.back().offset + terms_.write_buffer_bytes;
    const std::uint64_t end = position_ + record_footprint(length);
    return end <= covered ? 0 : round_up(end - covered, terms_.write_buffer_bytes) / terms_.write_buffer_bytes;
}

bool SegmentWriter::has_buffers(std::uint64_t length) const { return buffers_missing(length) <= pool_.free_count(); }

void SegmentWriter::cover(std::uint64_t end) {
    if (buffers_.empty()) {
        buffers_.push_back({pool_.take(), position_});
    }
    while (buffers_.back().offset + terms_.write_buffer_bytes < end) {
        buffers_.push_back({pool_.take(), buffers_.back().offset + terms_.write_buffer_bytes});
    }
}

// Gives back the buffers that begin at `end` or behind.
void SegmentWriter::uncover(std::uint64_t end) {
    while (!buffers_.empty() && buffers_.back().offset >= end) {
        pool_.give(buffers_.back().memory);
        buffers_.pop_back();
    }
}

std::uint64_t SegmentWriter::copy_in(std::uint64_t at, const std::uint8_t* bytes, std::uint64_t length) {
    for (const Buffer& buffer : buffers_) {
        const std::uint64_t end = buffer.offset + terms_.write_buffer_bytes;
        if (at < end && length > 0) {
            const std::uint64_t part = std::min(length, end - at);
            std::memcpy(buffer.memory + (at - buffer.offset), bytes, part);
            at += part;
            bytes += part;
            length -= part;
        }
    }
    return at;
}

// The digest of the item's bytes, while they are copied.
std::uint64_t SegmentWriter::copy_with_name(std::uint64_t at, const DiskItem& item) {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(item.address);
    RunDigest sum;
    std::uint64_t done = 0;
    for (const Buffer& buffer : buffers_) {
        const std::uint64_t end = buffer.offset + terms_.write_buffer_bytes;
        if (at < end && done < item.length) {
            const std::uint64_t part = std::min(item.length - done, end - at);
            auto* const target = reinterpret_cast<std::uint8_t*>(buffer.memory + (at - buffer.offset));
            sum = combine(sum, copy_with_digest(target, {bytes + done, part}, done));
            at += part;
            done += part;
        }
    }
    return finish(sum, name_of(item.key), item.length);
}

void SegmentWriter::zero(std::uint64_t begin, std::uint64_t end) {
    static constexpr std::uint8_t kZeros[kIoAlignment] = {};
    copy_in(begin, kZeros, end - begin);
}

bool SegmentWriter::append(const BatchPointer& batch, std::uint32_t number, const StoredForm& form) {
    const DiskItem& item = batch->item(number);
    const std::uint64_t stored = form.bytes.empty() ? item.length : form.bytes.size();
    const std::uint64_t end = position_ + record_footprint(stored);
    cover(end);
    const std::uint64_t payload = position_ + kRecordHeaderBytes;
    const std::span record(reinterpret_cast<const std::uint8_t*>(item.address), item.length);
    const std::uint64_t digest =
        form.bytes.empty() ? copy_with_name(payload, item) : digest_record(record, name_of(item.key));
    if (digest != item.digest) {
        uncover(position_);
        return false;
    }
    copy_in(payload, form.bytes.data(), form.bytes.size());
    zero(payload + stored, end);
    commit(make_record_header(seat_.life, item.key, item.parent, item.length, item.digest, RecordFlag::none,
                              form.bytes.size(), form.key),
           batch, number);
    return true;
}

void SegmentWriter::append_removal(const BatchPointer& batch, std::uint32_t number) {
    const std::uint64_t end = position_ + record_footprint(0);
    cover(end);
    zero(position_ + kRecordHeaderBytes, end);
    commit(make_record_header(seat_.life, batch->item(number).key, {}, 0, 0, RecordFlag::removal), batch, number);
}

void SegmentWriter::await_durable(const BatchPointer& batch, std::uint32_t item) {
    unsynced_.push_back({{}, {}, written_end_, RecordFlag::none, batch, item});
    ++wants_durable_;
}

bool SegmentWriter::has_appended(const KeyMark& mark) const {
    return std::ranges::any_of(appended_, [&mark](const AppendedRecord& one) { return one.mark == mark; });
}

void SegmentWriter::commit(const RecordHeader& header, const BatchPointer& batch, std::uint32_t item) {
    copy_in(position_, reinterpret_cast<const std::uint8_t*>(&header), sizeof header);
    entries_.push_back(make_entry(position_, header));
    position_ += record_footprint(stored_length(header));
    appended_.push_back(
        {mark_of(header.key), place_of(seat_.segment, entries_.back()), position_, header.flag, batch, item});
    if (first_waits_ == Instant::max()) {
        first_waits_ = terms_.now();
    }
    send_full();
}

void SegmentWriter::send_full() {
    while (!buffers_.empty() && buffers_.front().offset + terms_.write_buffer_bytes <= position_) {
        const Buffer buffer = buffers_.front();
        buffers_.pop_front();
        send(buffer, terms_.write_buffer_bytes);
    }
    if (buffers_.empty() || buffers_.front().offset == position_) {
        first_waits_ = Instant::max();
    }
}

// Sends the last buffer, filled with zeros up to a whole block, so the next record begins in a block of its own.
void SegmentWriter::flush() {
    first_waits_ = Instant::max();
    if (buffers_.empty() || buffers_.front().offset == position_) {
        return;
    }
    const std::uint64_t end = round_up(position_, kIoAlignment);
    zero(position_, end);
    position_ = end;
    const Buffer buffer = buffers_.front();
    buffers_.pop_front();
    send(buffer, position_ - buffer.offset);
}

void SegmentWriter::send(Buffer buffer, std::uint64_t bytes) {
    const std::uint64_t end = buffer.offset + bytes;
    ranges_.push_back({end, false});
    seat_.spent(bytes);
    ++under_way_;
    runner_.run(
        {IoKind::write, seat_.file, buffer.offset, buffer.memory, static_cast<std::uint32_t>(bytes), 0},
        terms_.now() + terms_.io_timeout,
        [this, end](int error) {
            --under_way_;
            if (error != 0) {
                fail("write", error);
                return;
            }
            std::ranges::find(ranges_, end, &Range::end)->is_written = true;
            advance();
        },
        [&pool = pool_, memory = buffer.memory] { pool.give(memory); });
}

void SegmentWriter::advance() {
    while (!ranges_.empty() && ranges_.front().is_written) {
        written_end_ = ranges_.front().end;
        ranges_.pop_front();
    }
    while (!appended_.empty() && appended_.front().end <= written_end_) {
        const AppendedRecord record = std::move(appended_.front());
        appended_.pop_front();
        seat_.written(record);
        wants_durable_ += record.batch && record.batch->wants_durable ? 1 : 0;
        unsynced_.push_back(record);
    }
    if (is_sealing_ && ranges_.empty() && !is_footer_sent_ && !has_failed_) {
        send_footer();
    }
}

void SegmentWriter::seal() {
    if (!is_sealing_) {
        flush();
        uncover(0);
        is_sealing_ = true;
        advance();
    }
}

// Sent when all it speaks of is written, so that a process that is killed leaves no footer of records that are not.
void SegmentWriter::send_footer() {
    is_footer_sent_ = true;
    const std::uint64_t bytes = footer_bytes(entries_.size());
    Result<AlignedMemory> made = AlignedMemory::create(bytes);
    if (!made.ok()) {
        fail("memory for a footer", ENOMEM);
        return;
    }
    auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    std::memcpy(memory->start(), entries_.data(), entries_.size() * sizeof(FooterEntry));
    const FooterTail tail = make_footer_tail(seat_.life, entries_.size(), terms_.segment_bytes,
                                             memory->span().first(bytes - sizeof(FooterTail)));
    std::memcpy(memory->start() + bytes - sizeof tail, &tail, sizeof tail);
    seat_.spent(bytes);
    ++under_way_;
    // Held by the second function for as long as the kernel may read it.
    runner_.run(
        {IoKind::write, seat_.file, terms_.segment_bytes - bytes, memory->start(), static_cast<std::uint32_t>(bytes),
         0},
        terms_.now() + terms_.io_timeout,
        [this](int error) {
            --under_way_;
            if (error != 0) {
                fail("write of a footer", error);
            } else {
                is_footer_written_ = true;
            }
        },
        [memory] {});
}

bool SegmentWriter::is_sync_due(Instant now) const {
    if (is_syncing_ || has_failed_) {
        return false;
    }
    const bool is_footer_due = is_footer_written_ && !is_footer_durable_;
    if (is_sealing_ && is_footer_due) {
        return true;
    }
    const bool is_old = now >= last_sync_ + terms_.sync_interval;
    return (written_end_ > durable_end_ || wants_durable_ > 0) &&
           (wants_durable_ > 0 || is_old || written_end_ - durable_end_ >= terms_.sync_bytes);
}

void SegmentWriter::sync() {
    is_syncing_ = true;
    ++under_way_;
    last_sync_ = terms_.now();
    runner_.run({IoKind::sync, seat_.file, 0, nullptr, 0, 0}, terms_.now() + terms_.io_timeout,
                [this, target = written_end_, with_footer = is_footer_written_](int error) {
                    --under_way_;
                    is_syncing_ = false;
                    if (error != 0) {
                        fail("fdatasync", error);
                        return;
                    }
                    if (has_failed_) {
                        return;
                    }
                    durable_end_ = target;
                    is_footer_durable_ = with_footer;
                    while (!unsynced_.empty() && unsynced_.front().end <= target) {
                        wants_durable_ -= unsynced_.front().batch && unsynced_.front().batch->wants_durable ? 1 : 0;
                        seat_.durable(unsynced_.front());
                        unsynced_.pop_front();
                    }
                });
}

void SegmentWriter::maintain(Instant now) {
    if (has_failed_) {
        return;
    }
    if (first_waits_ != Instant::max() && now >= first_waits_ + terms_.linger) {
        flush();
    }
    if (is_sync_due(now)) {
        sync();
    }
}

Instant SegmentWriter::next_wake() const {
    if (has_failed_) {
        return Instant::max();
    }
    Instant wake = first_waits_ == Instant::max() ? Instant::max() : first_waits_ + terms_.linger;
    if (!is_syncing_ && written_end_ > durable_end_) {
        wake = std::min(wake, last_sync_ + terms_.sync_interval);
    }
    return wake;
}

bool SegmentWriter::is_done() const noexcept { return under_way_ == 0 && (has_failed_ || is_footer_durable_); }

void SegmentWriter::fail(const std::string& what, int error) {
    if (has_failed_) {
        return;
    }
    give_up(DiskOutcome::failed);
    seat_.failed(system_fault(what, error).message());
}

void SegmentWriter::give_up(DiskOutcome outcome) {
    has_failed_ = true;
    uncover(0);
    for (std::deque<AppendedRecord>* records : {&appended_, &unsynced_}) {
        for (const AppendedRecord& record : *records) {
            if (record.batch) {
                record.batch->end(record.item, outcome);
            }
        }
        records->clear();
    }
}

}  // namespace kvo
