#include "arena/slot_pool.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvo {

std::optional<ExtentNumber> FreeRuns::take(std::uint32_t length, End end, Grid grid) {
    if (grid == Grid::own_length) {
        if (const std::optional<ExtentNumber> first = take_on_grid(length, end)) {
            return first;
        }
    }
    auto fit = by_length_.lower_bound({length, 0});
    if (fit == by_length_.end()) {
        return std::nullopt;
    }
    if (end == End::high) {
        fit = std::prev(by_length_.lower_bound({fit->first + 1, 0}));
    }
    const auto [run_length, run_first] = *fit;
    const ExtentNumber first = end == End::low ? run_first : run_first + run_length - length;
    take_at(first, length);
    return first;
}

// Takes a cell from the shortest run that has a whole one. Of the runs that may be too short for one, it tries at most
// 64.
std::optional<ExtentNumber> FreeRuns::take_on_grid(std::uint32_t length, End end) {
    int tries = 64;
    for (auto group = by_length_.lower_bound({length, 0}); group != by_length_.end();) {
        const auto group_end = by_length_.lower_bound({group->first + 1, 0});
        for (auto run = end == End::low ? group : std::prev(group_end); tries > 0; --tries) {
            if (const std::optional<ExtentNumber> first = cell_in(run->second, run->first, length, end)) {
                take_at(*first, length);
                return first;
            }
            if (run == (end == End::low ? std::prev(group_end) : group)) {
                break;
            }
            run = end == End::low ? std::next(run) : std::prev(run);
        }
        if (tries == 0 && group->first < 2 * length - 1) {
            tries = 1;  // any of these has a cell
            group = by_length_.lower_bound({2 * length - 1, 0});
        } else {
            group = group_end;
        }
    }
    return std::nullopt;
}

// The first extent of the run's lowest or highest cell.
std::optional<ExtentNumber> FreeRuns::cell_in(ExtentNumber first, std::uint32_t run_length, std::uint32_t length,
                                              End end) const {
    const std::uint32_t behind = extents_per_segment_ - first % extents_per_segment_;  // to the segment's end
    const std::uint32_t lowest = behind / length;
    const std::uint32_t highest = (behind - run_length + length - 1) / length + 1;
    if (lowest < highest) {
        return std::nullopt;
    }
    return first + behind - (end == End::low ? lowest : highest) * length;
}

bool FreeRuns::take_at(ExtentNumber first, std::uint32_t length) {
    auto run = by_place_.upper_bound(first);
    if (run == by_place_.begin()) {
        return false;
    }
    --run;
    const auto [run_first, run_length] = *run;
    const std::uint64_t run_end = std::uint64_t{run_first} + run_length;
    const std::uint64_t end = std::uint64_t{first} + length;
    if (end > run_end) {
        return false;
    }
    erase(run);
    if (run_first < first) {
        insert(run_first, first - run_first);
    }
    if (end < run_end) {
        insert(static_cast<ExtentNumber>(end), static_cast<std::uint32_t>(run_end - end));
    }
    return true;
}

void FreeRuns::give(ExtentNumber first, std::uint32_t length) {
    auto next = by_place_.lower_bound(first);
    if (next != by_place_.begin() && first % extents_per_segment_ != 0) {
        const auto before = std::prev(next);
        if (before->first + before->second == first) {
            first = before->first;
            length += before->second;
            next = erase(before);
        }
    }
    if (next != by_place_.end() && first + length == next->first && next->first % extents_per_segment_ != 0) {
        length += next->second;
        erase(next);
    }
    insert(first, length);
}

void FreeRuns::insert(ExtentNumber first, std::uint32_t length) {
    by_place_.emplace(first, length);
    by_length_.emplace(length, first);
    total_ += length;
}

FreeRuns::ByPlace::iterator FreeRuns::erase(ByPlace::iterator run) {
    by_length_.erase({run->second, run->first});
    total_ -= run->second;
    return by_place_.erase(run);
}

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

void SlotPool::withdraw(ExtentNumber first) {
    withdrawn = first;
    for (auto run = runs.by_place().lower_bound(first); run != runs.by_place().end();
         run = runs.by_place().lower_bound(first)) {
        runs.take_at(run->first, run->second);
    }
    for (ExtentNumber at = first; at < spans.extent_count(); ++at) {
        if (spans.is_span(at)) {
            spans.begin_drain(at);
        }
    }
}

void SlotPool::restore() {
    const ExtentNumber end = spans.extent_count();
    for (ExtentNumber at = std::exchange(withdrawn, kNone); at < end;) {
        std::uint32_t length = 1;
        if (spans.is_span(at)) {
            length = spans.size_of(at).shape.extents;
            spans.settle(at);
        } else {
            runs.give(at, 1);
        }
        at += length;
    }
}

std::uint32_t SlotPool::cut() {
    const ExtentNumber end = spans.extent_count();
    ExtentNumber used_end = end;
    while (used_end > withdrawn && !spans.is_span(used_end - 1)) {
        --used_end;
    }
    // A span is known by its first extent, and ends in the same segment.
    const ExtentNumber kept = (used_end + extents_per_segment - 1) / extents_per_segment * extents_per_segment;
    if (kept >= end) {
        return 0;
    }
    spans.cut(kept);
    if (kept == withdrawn) {
        withdrawn = kNone;
    }
    return end - kept;
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
    if (first >= withdrawn) {
        if (spans.is_empty(first)) {
            spans.remove(first);
        }
        return;
    }
    if (spans.settle(first)) {
        runs.give(first, spans.remove(first));
    }
}

}  // namespace kvo
