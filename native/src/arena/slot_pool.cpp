#include "arena/slot_pool.hpp"

#include <algorithm>

namespace kvo {
namespace {

// Spans of at least so many extents collect at the pool's high end.
constexpr std::uint32_t kLongSpan = 8;

}  // namespace

void SlotPool::add_extents(std::uint32_t count) {
    ExtentNumber first = spans.extent_count();
    spans.add_extents(count);
    // No run crosses a segment's end.
    for (const ExtentNumber end = first + count; first < end;) {
        const std::uint32_t part = std::min(end - first, extents_per_segment - first % extents_per_segment);
        runs.give(first, part);
        first += part;
    }
}

std::optional<Slot> SlotPool::allocate(ClassNumber number, EntryNumber owner) {
    if (const std::optional<Slot> slot = spans.take_hole(number, owner)) {
        return slot;
    }
    const SpanShape shape = spans.size_class(number).shape;
    const auto end = shape.extents < kLongSpan ? FreeRuns::End::low : FreeRuns::End::high;
    // Records that fill a span lie on a grid: between two that do not, no third would find room for good.
    const auto grid = shape.is_one_record() ? FreeRuns::Grid::own_length : FreeRuns::Grid::none;
    const std::optional<ExtentNumber> first = runs.take(shape.extents, end, grid);
    if (!first) {
        return std::nullopt;
    }
    spans.add(number, *first);
    return spans.take_hole(number, owner);
}

Claim SlotPool::claim(ClassNumber number, Slot slot, EntryNumber owner) {
    const SpanShape shape = spans.size_class(number).shape;
    if (slot.index >= shape.slots) {
        return Claim::misplaced;
    }
    if (spans.is_span(slot.span)) {
        if (spans.mark_of(slot.span).number != number || spans.mark_of(slot.span).is_draining) {
            return Claim::misplaced;
        }
        return spans.take_at(slot, owner) ? Claim::granted : Claim::taken;
    }
    if (!runs.take_at(slot.span, shape.extents)) {
        return Claim::misplaced;
    }
    spans.add(number, slot.span);
    spans.take_at(slot, owner);
    return Claim::granted;
}

void SlotPool::release(Slot slot) {
    spans.put_back(slot);
    remove_if_empty(slot.span);
}

void SlotPool::begin_move(Slot from, Slot to) noexcept {
    spans.begin_move(from.span);
    spans.begin_move(to.span);
}

void SlotPool::end_move(Slot from, Slot to, Slot left) {
    spans.end_move(from.span);
    spans.end_move(to.span);
    spans.put_back(left);
    remove_if_empty(from.span);
    remove_if_empty(to.span);
}

void SlotPool::remove_if_empty(ExtentNumber first) {
    if (spans.settle(first)) {
        runs.give(first, spans.remove(first));
    }
}

}  // namespace kvo
