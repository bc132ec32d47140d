#include "arena/span_table.hpp"

#include <algorithm>
#include <bit>
#include <cassert>

namespace kvo {
namespace {

constexpr double kWasteAllowed = 0.015;

}  // namespace

SpanShape span_shape(std::uint64_t slot_bytes, std::uint64_t extent_bytes, std::uint64_t segment_bytes) noexcept {
    if (slot_bytes == 0 || slot_bytes > segment_bytes) {
        return {};
    }
    const std::uint64_t shortest = (slot_bytes + extent_bytes - 1) / extent_bytes;
    const std::uint64_t longest = std::max(shortest, segment_bytes / extent_bytes / 4);
    SpanShape best;
    double best_waste = 1;
    for (std::uint64_t extents = shortest; extents <= longest && best_waste > kWasteAllowed; ++extents) {
        const std::uint64_t span_bytes = extents * extent_bytes;
        const std::uint64_t slots = span_bytes / slot_bytes;
        const double waste = static_cast<double>(span_bytes - slots * slot_bytes) / static_cast<double>(span_bytes);
        if (waste < best_waste) {
            best = {static_cast<std::uint32_t>(extents), static_cast<std::uint32_t>(slots)};
            best_waste = waste;
        }
    }
    return best;
}

namespace {

// Holes of a size that stay where they are: the more there are, the emptier the sparsest span and the cheaper it is to
// drain. One slot in 64 is little memory.
constexpr std::uint64_t kSlotsPerKeptHole = 64;

}  // namespace

void SpanTable::reserve(std::uint32_t extents) {
    marks_.reserve(extents);
    spans_.reserve(extents);
}

void SpanTable::add_extents(std::uint32_t count) {
    marks_.resize(marks_.size() + count);
    spans_.resize(marks_.size());
    segment_live_bytes_.resize((spans_.size() + extents_per_segment_ - 1) / extents_per_segment_);
}

void SpanTable::cut(ExtentNumber first) {
    marks_.resize(first);
    spans_.resize(first);
    segment_live_bytes_.resize(first / extents_per_segment_);
}

ClassNumber SpanTable::add_class(std::uint64_t record_bytes, std::uint64_t slot_bytes, SpanShape shape) {
    classes_.emplace_back();
    const auto number = static_cast<ClassNumber>(classes_.size() - 1);
    change_class(number, record_bytes, slot_bytes, shape);
    return number;
}

// One that is being drained has records, or is gone.
std::optional<ClassNumber> SpanTable::find_unused_class() const noexcept {
    const auto unused =
        std::ranges::find_if(classes_, [](const Class& size) { return size.facts.spans == 0 && size.facts.live == 0; });
    return unused == classes_.end() ? std::nullopt : std::optional(static_cast<ClassNumber>(unused - classes_.begin()));
}

void SpanTable::change_class(ClassNumber unused, std::uint64_t record_bytes, std::uint64_t slot_bytes,
                             SpanShape shape) {
    Class& size = classes_[unused];
    assert(size.facts.spans == 0 && size.facts.live == 0 && size.facts.spare_spans == 0);
    size = {};
    size.facts = {.record_bytes = record_bytes, .slot_bytes = slot_bytes, .shape = shape};
    size.lists.fill(kNoSpan);
    count_spare(size);
}

void SpanTable::add(ClassNumber number, ExtentNumber first) {
    Class& size = classes_[number];
    const std::uint32_t slots = size.facts.shape.slots;
    const std::uint32_t words = words_of(slots);
    assert(!marks_[first].is_span);
    marks_[first] = {.number = number, .is_span = true};
    Span& span = spans_[first];
    span = {.slots = std::make_unique_for_overwrite<std::uint32_t[]>(words + slots),
            .segment = first / extents_per_segment_};
    std::fill_n(span.slots.get(), words, 0xffffffff);
    if (slots % 32 != 0) {
        span.slots[words - 1] = (1U << slots % 32) - 1;
    }
    ++size.facts.spans;
    link(first, level_of(slots));
    size.facts.holes += slots;
    count_spare(size);
}

std::uint32_t SpanTable::remove(ExtentNumber first) {
    const SpanMark mark = marks_[first];
    assert(mark.is_span && mark.live == 0 && spans_[first].moves == 0);
    Class& size = classes_[mark.number];
    const SpanShape shape = size.facts.shape;
    if (!mark.is_draining) {
        unlink(first, level_of(shape.slots));
        --size.facts.spans;
        size.facts.holes -= shape.slots;
        count_spare(size);
    }
    marks_[first] = {};
    spans_[first] = {};
    return shape.extents;
}

std::optional<Slot> SpanTable::take_hole(ClassNumber number, EntryNumber owner) {
    const Class& size = classes_[number];
    if (size.levels == 0) {
        return std::nullopt;
    }
    const ExtentNumber first = size.lists[static_cast<std::size_t>(std::countr_zero(size.levels))];
    Span& span = spans_[first];
    while (span.slots[span.first_word] == 0) {
        ++span.first_word;
    }
    const Slot slot{first,
                    span.first_word * 32 + static_cast<std::uint32_t>(std::countr_zero(span.slots[span.first_word]))};
    take(first, slot.index, owner);
    return slot;
}

bool SpanTable::take_at(Slot slot, EntryNumber owner) {
    const Span& span = spans_[slot.span];
    if ((span.slots[slot.index / 32] >> slot.index % 32 & 1) == 0) {
        return false;
    }
    take(slot.span, slot.index, owner);
    return true;
}

void SpanTable::take(ExtentNumber first, std::uint32_t index, EntryNumber owner) noexcept {
    SpanMark& mark = marks_[first];
    const Span& span = spans_[first];
    Class& size = classes_[mark.number];
    span.slots[index / 32] &= ~(1U << index % 32);
    span.slots[words_of(size.facts.shape.slots) + index] = owner;
    const std::uint32_t holes = size.facts.shape.slots - mark.live++;
    segment_live_bytes_[span.segment] += size.facts.slot_bytes;
    ++size.facts.live;
    assert(!mark.is_draining);
    relist(first, holes, holes - 1);
    change_holes(size, -1);
}

void SpanTable::put_back(Slot slot) {
    SpanMark& mark = marks_[slot.span];
    Span& span = spans_[slot.span];
    Class& size = classes_[mark.number];
    const std::uint32_t word = slot.index / 32;
    assert((span.slots[word] >> slot.index % 32 & 1) == 0);
    span.slots[word] |= 1U << slot.index % 32;
    span.first_word = std::min(span.first_word, word);
    const std::uint32_t holes = size.facts.shape.slots - mark.live--;
    segment_live_bytes_[span.segment] -= size.facts.slot_bytes;
    --size.facts.live;
    if (!mark.is_draining) {
        relist(slot.span, holes, holes + 1);
        change_holes(size, 1);
    }
}

void SpanTable::begin_drain(ExtentNumber first) {
    SpanMark& mark = marks_[first];
    Class& size = classes_[mark.number];
    assert(is_idle(first));
    const std::uint32_t holes = size.facts.shape.slots - mark.live;
    if (holes != 0) {
        unlink(first, level_of(holes));
    }
    mark.is_draining = true;
    --size.facts.spans;
    size.facts.holes -= holes;
    count_spare(size);
}

bool SpanTable::settle(ExtentNumber first) {
    SpanMark& mark = marks_[first];
    if (spans_[first].moves != 0) {
        return false;
    }
    if (mark.live == 0) {
        return true;
    }
    if (mark.is_draining) {
        Class& size = classes_[mark.number];
        const std::uint32_t holes = size.facts.shape.slots - mark.live;
        if (holes != 0) {
            link(first, level_of(holes));
        }
        mark.is_draining = false;
        ++size.facts.spans;
        size.facts.holes += holes;
        count_spare(size);
    }
    return false;
}

EntryNumber SpanTable::owner_at(Slot slot) const noexcept {
    if (!is_span(slot.span)) {
        return kNoEntry;
    }
    const Span& span = spans_[slot.span];
    const std::uint32_t slots = size_of(slot.span).shape.slots;
    const bool is_taken = slot.index < slots && (span.slots[slot.index / 32] >> slot.index % 32 & 1) == 0;
    return is_taken ? span.slots[words_of(slots) + slot.index] : kNoEntry;
}

// Two steps for each doubling of the holes.
std::uint32_t SpanTable::level_of(std::uint32_t holes) noexcept {
    const auto width = static_cast<std::uint32_t>(std::bit_width(holes));
    return width < 2 ? 0 : 2 * (width - 1) + (holes >> (width - 2) & 1);
}

void SpanTable::link(ExtentNumber first, std::uint32_t level) noexcept {
    Class& size = classes_[marks_[first].number];
    const std::uint32_t next = size.lists[level];
    spans_[first].next = next;
    spans_[first].previous = kNoSpan;
    if (next != kNoSpan) {
        spans_[next].previous = first;
    }
    size.lists[level] = first;
    size.levels |= std::uint64_t{1} << level;
}

void SpanTable::unlink(ExtentNumber first, std::uint32_t level) noexcept {
    Class& size = classes_[marks_[first].number];
    const auto [next, previous] = std::pair(spans_[first].next, spans_[first].previous);
    if (next != kNoSpan) {
        spans_[next].previous = previous;
    }
    if (previous != kNoSpan) {
        spans_[previous].next = next;
        return;
    }
    size.lists[level] = next;
    if (next == kNoSpan) {
        size.levels &= ~(std::uint64_t{1} << level);
    }
}

void SpanTable::relist(ExtentNumber first, std::uint32_t old_holes, std::uint32_t new_holes) noexcept {
    const std::uint32_t old_level = level_of(old_holes);
    const std::uint32_t new_level = level_of(new_holes);
    if (old_holes != 0 && (new_holes == 0 || new_level != old_level)) {
        unlink(first, old_level);
    }
    if (new_holes != 0 && (old_holes == 0 || new_level != old_level)) {
        link(first, new_level);
    }
}

void SpanTable::change_holes(Class& size, std::int64_t change) noexcept {
    size.facts.holes += static_cast<std::uint64_t>(change);
    if (size.facts.holes >= size.spare_above || size.facts.holes < size.spare_below) {
        count_spare(size);
    }
}

void SpanTable::count_spare(Class& size) noexcept {
    const SpanShape shape = size.facts.shape;
    const std::uint64_t kept = std::uint64_t{size.facts.spans} * shape.slots / kSlotsPerKeptHole;
    const std::uint64_t holes = size.facts.holes;
    const std::uint64_t spare = holes > kept ? (holes - kept) / shape.slots : 0;
    spare_extents_ += (spare - size.facts.spare_spans) * shape.extents;
    size.facts.spare_spans = spare;
    size.spare_above = kept + (spare + 1) * shape.slots;
    size.spare_below = spare == 0 ? 0 : kept + spare * shape.slots;
}

}  // namespace kvo
