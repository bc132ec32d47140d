#include "disk/device_writer.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace kvo {

std::optional<StoredForm> RecordCoder::code(const DiskItem& item) {
    const std::span<const std::uint8_t> coded = encode(item);
    if (!terms_.seal_keys) {
        return StoredForm{coded, std::nullopt};
    }
    const SealKeys& keys = *terms_.seal_keys;
    const std::span payload =
        coded.empty() ? std::span(reinterpret_cast<const std::uint8_t*>(item.address), item.length) : coded;
    const SealedForm form = coded.empty() ? SealedForm::plain : SealedForm::coded;
    sealed_.resize(payload.size() + kSealOverheadBytes);
    tried_bytes_ += coded.empty() ? item.length : 0;
    if (!keys.seal(sealed_name(item.key, item.parent, item.length), item.digest, form, payload, sealed_).ok()) {
        return std::nullopt;
    }
    return StoredForm{sealed_, keys.sealing()};
}

// The coded record, valid until the next call; empty if it is written plain.
std::span<const std::uint8_t> RecordCoder::encode(const DiskItem& item) {
    if (!choice_.wants(item.key.group, item.length)) {
        return {};
    }
    const std::span record(reinterpret_cast<const std::uint8_t*>(item.address), item.length);
    const std::span<const std::uint8_t> coded = encoder_.encode(record);
    tried_bytes_ += item.length;
    choice_.told_coded(item.key.group, item.length, coded.empty() ? item.length : coded.size());
    if (!coded.empty() && choice_.needs_trial()) {
        std::vector<std::uint8_t> scratch(record.size());
        const Instant begun = terms_.now();
        static_cast<void>(decode_record(coded, scratch));
        choice_.told_decoded(record.size(), terms_.now() - begun);
    }
    if (!coded.empty()) {
        ++counts_.coded_records;
        counts_.coded_bytes += item.length;
        counts_.coded_stored_bytes += coded.size();
    }
    return coded;
}

DeviceWriter::DeviceWriter(const DeviceWriterSeat& seat) : seat_(seat), coder_(seat.terms, seat.coding, seat.counts) {}

void DeviceWriter::add(DevicePart part) {
    Queue& queue = part.batch->is_move ? moves_ : puts_;
    for (const std::uint32_t item : part.items) {
        queue.bytes += part.batch->item(item).length;
    }
    queue.parts.push_back(std::move(part));
}

void DeviceWriter::pump() {
    coder_.begin_step();
    pump(moves_);
    pump(puts_);
    seat_.coding.told_waiting(coder_.has_coded_enough() ? puts_.bytes : 0);
}

void DeviceWriter::give_up() {
    give_up(puts_);
    give_up(moves_);
}

void DeviceWriter::pump(Queue& queue) {
    while (!queue.parts.empty() && seat_.condition.is_writing()) {
        const DevicePart& part = queue.parts.front();
        for (; queue.next < part.items.size(); ++queue.next) {
            if (coder_.has_coded_enough()) {
                return;  // reads go first
            }
            const std::uint32_t item = part.items[queue.next];
            const bool is_removal = part.batch->verb == DiskVerb::remove;
            const bool is_done = is_end(part.batch->item(item).outcome) ||
                                 (is_removal ? write_removal(part.batch, item) : write_item(part.batch, item));
            if (!is_done) {
                return;
            }
            queue.bytes -= part.batch->item(item).length;
        }
        queue.parts.pop_front();
        queue.next = 0;
    }
}

void DeviceWriter::give_up(Queue& queue) {
    for (const DevicePart& part : std::exchange(queue.parts, {})) {
        for (const std::uint32_t item : part.items) {
            // Those in front of `next` are the writers'.
            if (queue.next == 0) {
                part.batch->end(item, DiskOutcome::unavailable);
            } else {
                --queue.next;
            }
        }
    }
    queue.next = queue.bytes = 0;
}

// Returns false if the item must wait.
bool DeviceWriter::write_item(const BatchPointer& batch, std::uint32_t number) {
    const DiskItem& item = batch->item(number);
    const std::uint64_t most = most_stored(seat_.terms, item.length), footprint = record_footprint(most);
    const bool is_too_large =
        item.length > seat_.terms.record_limit_bytes ||
        kHeadBytes + round_up(footprint, kIoAlignment) + footer_bytes(1) > seat_.terms.segment_bytes;
    if (batch->deadline <= seat_.terms.now() || is_too_large) {
        batch->end(number, is_too_large ? DiskOutcome::too_large : DiskOutcome::late);
        return true;
    }
    const std::optional<RecordPlace> place = seat_.index.find(mark_of(item.key));
    if (batch->is_move && !place) {
        batch->end(number, DiskOutcome::missing);  // removed while it was on its way
        return true;
    }
    if (!batch->is_move && place && place->length == item.length) {
        seat_.open.end_present(batch, number, *place);
        return true;
    }
    if (!batch->is_move && !seat_.files.may_spend(footprint)) {
        ++seat_.counts.over_budget_records;
        batch->end(number, DiskOutcome::over_budget);
        return true;
    }
    if (!make_room(most, batch->is_move)) {
        return batch->is_move && end_without_room(batch, number);
    }
    if (!batch->claim(number)) {
        return true;
    }
    const std::optional<StoredForm> form = coder_.code(item);
    if (!form) {
        batch->end(number, DiskOutcome::failed);
        return true;
    }
    if (!seat_.open.append(batch, number, *form)) {
        ++seat_.counts.damaged_records;
        batch->end(number, DiskOutcome::damaged);
        return true;
    }
    batch->release(number);
    (batch->is_move ? seat_.counts.moved_bytes : seat_.counts.put_bytes) += item.length;
    seat_.counts.put_records += batch->is_move ? 0 : 1;
    if (!batch->is_move) {
        seat_.evictor.add_put(item.length);
    }
    return true;
}

bool DeviceWriter::write_removal(const BatchPointer& batch, std::uint32_t number) {
    const KeyMark mark = mark_of(batch->item(number).key);
    const bool is_there = seat_.index.find(mark).has_value();
    const bool is_written_again = is_there || seat_.open.has_appended(mark);
    if (batch->is_move ? is_written_again : !is_there) {
        batch->end(number, batch->is_move ? DiskOutcome::removed : DiskOutcome::missing);
        return true;
    }
    if (!make_room(0, batch->is_move)) {
        const bool is_over = batch->is_move && end_without_room(batch, number);
        if (is_over) {
            seat_.losses.told_left_out(batch, number);
        }
        return is_over;
    }
    {
        const std::lock_guard hold(seat_.index.lock);
        seat_.index.index.erase(mark);
    }
    seat_.open.append_removal(batch, number);
    return true;
}

// Ends the item of a move if there is no room for it. Returns false if there is room and the item only waits for a
// buffer.
bool DeviceWriter::end_without_room(const BatchPointer& batch, std::uint32_t item) {
    const bool has_no_room = seat_.open.has_no_room();
    if (has_no_room) {
        batch->end(item, DiskOutcome::failed);  // it goes with its segment, rather than hold it
    }
    return has_no_room;
}

bool DeviceWriter::make_room(std::uint64_t length, bool is_move) {
    // The rest of the last segment is kept for the moves that will empty another one.
    if (!is_move && seat_.evictor.is_moving() && seat_.files.empty_count() == 0) {
        return false;
    }
    return seat_.open.make_room(length, is_move);
}

}  // namespace kvo
