// The spans that exist: who lives in their slots, and which of a size are fuller than others.
//
// Spans are held by their first extent. Those of one size that have holes are listed by how many, coarsely: new
// records go to the fullest, so that sparse ones empty and give their extents back. A span that is being drained is on
// no list and its holes count for nothing.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/entry_number.hpp"

namespace kvo {

// Names for places in the pool; no addresses, so they may be stored and sent.

using ExtentNumber = std::uint32_t;  // counted over all segments
using ClassNumber = std::uint16_t;   // of a record size

// One record's place: a span, named by its first extent, and the position in it.
struct Slot {
    ExtentNumber span = 0;
    std::uint32_t index = 0;

    bool operator==(const Slot&) const = default;
};

constexpr std::uint64_t pack_slot(Slot slot) noexcept { return std::uint64_t{slot.span} << 32 | slot.index; }
constexpr Slot unpack_slot(std::uint64_t packed) noexcept {
    return {static_cast<std::uint32_t>(packed >> 32), static_cast<std::uint32_t>(packed)};
}

// Where a slot's bytes begin, counted over all segments as if they lay one behind the other.
constexpr std::uint64_t slot_address(Slot slot, std::uint64_t extent_bytes, std::uint64_t slot_bytes) noexcept {
    return slot.span * extent_bytes + slot.index * slot_bytes;
}

// The same within its segment.
struct SlotPlace {
    std::uint32_t segment = 0;
    std::uint64_t offset_bytes = 0;

    bool operator==(const SlotPlace&) const = default;
};

// How extents are cut into slots of one size.
//
//     span:  | extent | extent | extent |        k extents in a row, in one segment, serving one record size
//            |slot|slot|slot|slot|slot|~|        n slots; what remains at the end is waste

struct SpanShape {
    std::uint32_t extents = 0;  // 0: such a slot fits no segment
    std::uint32_t slots = 0;

    // Such a record can go nowhere but to another run of extents as long.
    constexpr bool is_one_record() const { return slots == 1; }
    bool operator==(const SpanShape&) const = default;
};

// A record's place: whole cache lines; from 16 KiB on whole disk sectors, where 512 bytes hardly matter.
constexpr std::uint64_t slot_bytes_for(std::uint64_t record_bytes) noexcept {
    const std::uint64_t unit = record_bytes < 16 * 1024 ? 64 : 512;
    return (record_bytes + unit - 1) / unit * unit;
}

// The shortest span that wastes little (1.5%), since a long one is harder to find room for. Where none up to a quarter
// of the segment does, the one that wastes least. `extent_bytes` must divide `segment_bytes`.
SpanShape span_shape(std::uint64_t slot_bytes, std::uint64_t extent_bytes, std::uint64_t segment_bytes) noexcept;

// One record size.
struct SizeClass {
    std::uint64_t record_bytes = 0;
    std::uint64_t slot_bytes = 0;
    SpanShape shape;
    std::uint64_t live = 0;   // records
    std::uint32_t spans = 0;  // without those that are being drained
    std::uint64_t holes = 0;  // in these
    // Spans whose records would fit into the other spans' holes, and some holes still remain.
    std::uint64_t spare_spans = 0;
};

// The facts about a span that a search over all extents reads. Small, so that the search is fast.
struct SpanMark {
    std::uint32_t live = 0;
    ClassNumber number = 0;
    bool is_span = false;  // one begins at this extent
    bool is_draining = false;
};

class SpanTable {
public:
    explicit SpanTable(std::uint32_t extents_per_segment) noexcept : extents_per_segment_(extents_per_segment) {}

    SpanTable(SpanTable&&) = default;
    SpanTable& operator=(SpanTable&&) = default;

    // Reserves memory for so many extents in all, so that adding them does not reallocate.
    void reserve(std::uint32_t extents);
    void add_extents(std::uint32_t count);
    // Drops the extents from this one on, the first of a segment. None of them may be part of a span.
    void cut(ExtentNumber first);
    ClassNumber add_class(std::uint64_t record_bytes, std::uint64_t slot_bytes, SpanShape shape);
    // Returns a class without spans, if there is one. Looks at all classes.
    std::optional<ClassNumber> find_unused_class() const noexcept;
    // Gives the number of such an unused class to another size.
    void change_class(ClassNumber unused, std::uint64_t record_bytes, std::uint64_t slot_bytes, SpanShape shape);

    // A span without records at extents that serve none.
    void add(ClassNumber number, ExtentNumber first);
    // A span that has become empty; returns its length.
    std::uint32_t remove(ExtentNumber first);

    // The lowest hole of a span that is as full as any; none if this size has no hole.
    std::optional<Slot> take_hole(ClassNumber number, EntryNumber owner);
    // Exactly this slot of an existing span; false if it is taken.
    bool take_at(Slot slot, EntryNumber owner);
    // The slot must be taken.
    void put_back(Slot slot);

    // Nothing is put into the span from now on until it is settled. It must be idle.
    void begin_drain(ExtentNumber first);
    // Planned moves out of a span or into it. A span with either is not idle: no record is to move twice at once.
    void begin_move(ExtentNumber first) noexcept { ++spans_[first].moves; }
    void end_move(ExtentNumber first) noexcept { --spans_[first].moves; }
    // Takes a drained span without moves back into use if it has records. True if it is empty and can be removed.
    bool settle(ExtentNumber first);

    // A span with few records among the sparsest of its size, of which only a few are looked at.
    template <typename Accept>
    std::optional<ExtentNumber> sparsest(ClassNumber number, Accept&& accept) const;

    // kNoEntry if the slot is not taken, whatever its numbers are.
    EntryNumber owner_at(Slot slot) const noexcept;

    bool is_span(ExtentNumber first) const noexcept { return first < marks_.size() && marks_[first].is_span; }
    // No planned move leaves the span or enters it, and it is not being drained.
    bool is_idle(ExtentNumber first) const noexcept { return spans_[first].moves == 0 && !marks_[first].is_draining; }
    // It has no records, and none is on its way into it or out of it.
    bool is_empty(ExtentNumber first) const noexcept { return marks_[first].live == 0 && spans_[first].moves == 0; }
    const SpanMark& mark_of(ExtentNumber first) const noexcept { return marks_[first]; }
    const SizeClass& size_of(ExtentNumber first) const noexcept { return classes_[marks_[first].number].facts; }
    std::uint64_t live_bytes_of(ExtentNumber first) const noexcept {
        return marks_[first].live * size_of(first).slot_bytes;
    }
    const SizeClass& size_class(ClassNumber number) const noexcept { return classes_[number].facts; }
    std::size_t class_count() const noexcept { return classes_.size(); }
    std::uint32_t extent_count() const noexcept { return static_cast<std::uint32_t>(marks_.size()); }
    // The last one may be there in part.
    std::uint32_t segment_count() const noexcept { return static_cast<std::uint32_t>(segment_live_bytes_.size()); }
    std::uint64_t spare_extents() const noexcept { return spare_extents_; }
    std::uint64_t segment_live_bytes(std::uint32_t segment) const noexcept { return segment_live_bytes_[segment]; }

    // visit(Slot, EntryNumber) for the span's records, lowest first, until it says false. True: it never did.
    template <typename Visit>
    bool for_each_live(ExtentNumber first, Visit&& visit) const;

private:
    static constexpr std::uint32_t kNoSpan = 0xffffffff;
    static constexpr std::size_t kLevels = 64;
    static constexpr std::uint32_t kSparsestTried = 32;

    struct Span {
        // Words of a bit per slot, set where it is a hole; then the owners.
        std::unique_ptr<std::uint32_t[]> slots;
        std::uint32_t first_word = 0;  // no word before it has a hole
        std::uint32_t next = kNoSpan;
        std::uint32_t previous = kNoSpan;
        std::uint32_t moves = 0;
        std::uint32_t segment = 0;
    };

    struct Class {
        SizeClass facts;
        std::uint64_t spare_above = 0;  // spare_spans is right as long as there are fewer holes than this
        std::uint64_t spare_below = 0;  // and at least this many
        std::uint64_t levels = 0;       // a bit for each list that is not empty
        std::array<std::uint32_t, kLevels> lists{};
    };

    static std::uint32_t level_of(std::uint32_t holes) noexcept;
    static std::uint32_t words_of(std::uint32_t slots) noexcept { return (slots + 31) / 32; }
    void link(ExtentNumber first, std::uint32_t level) noexcept;
    void unlink(ExtentNumber first, std::uint32_t level) noexcept;
    void relist(ExtentNumber first, std::uint32_t old_holes, std::uint32_t new_holes) noexcept;
    void take(ExtentNumber first, std::uint32_t index, EntryNumber owner) noexcept;
    void change_holes(Class& size, std::int64_t change) noexcept;
    void count_spare(Class& size) noexcept;

    std::uint32_t extents_per_segment_;
    std::uint64_t spare_extents_ = 0;
    std::vector<SpanMark> marks_;  // by first extent
    std::vector<Span> spans_;      // likewise
    std::vector<Class> classes_;
    std::vector<std::uint64_t> segment_live_bytes_;
};

template <typename Accept>
std::optional<ExtentNumber> SpanTable::sparsest(ClassNumber number, Accept&& accept) const {
    const Class& size = classes_[number];
    std::optional<ExtentNumber> best;
    std::uint32_t tried = 0;
    for (std::uint64_t levels = size.levels; levels != 0 && !best;) {
        const auto level = static_cast<std::uint32_t>(std::bit_width(levels) - 1);
        levels &= ~(std::uint64_t{1} << level);
        for (std::uint32_t first = size.lists[level]; first != kNoSpan && tried < kSparsestTried; ++tried) {
            if ((!best || marks_[first].live < marks_[*best].live) && accept(first)) {
                best = first;
            }
            first = spans_[first].next;
        }
    }
    return best;
}

template <typename Visit>
bool SpanTable::for_each_live(ExtentNumber first, Visit&& visit) const {
    const Span& span = spans_[first];
    const std::uint32_t slots = size_of(first).shape.slots;
    const std::uint32_t words = words_of(slots);
    for (std::uint32_t word = 0; word < words; ++word) {
        const std::uint32_t begin = word * 32;
        const std::uint32_t mask = slots - begin < 32 ? (1U << (slots - begin)) - 1 : 0xffffffff;
        for (std::uint32_t taken = ~span.slots[word] & mask; taken != 0; taken &= taken - 1) {
            const std::uint32_t index = begin + static_cast<std::uint32_t>(std::countr_zero(taken));
            if (!visit(Slot{first, index}, span.slots[words + index])) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace kvo
