// Spans and free extents together: a span is made when a size runs out of holes, and gone when its last record is.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "arena/span_table.hpp"

namespace kvo {

// Which extents serve no span, as runs of neighbours. A run never crosses a segment's end.
class FreeRuns {
public:
    using ByPlace = std::map<ExtentNumber, std::uint32_t>;  // first extent, length

    // Where in the pool a span goes: long spans collect at one end and short ones at the other, so that a short one
    // rarely stands in a long one's way.
    enum class End : std::uint8_t { low, high };

    // Whether it lies a multiple of its length before its segment's end, where there is such a place.
    enum class Grid : std::uint8_t { none, own_length };

    explicit FreeRuns(std::uint32_t extents_per_segment) noexcept : extents_per_segment_(extents_per_segment) {}

    // From the shortest run that is long enough, so that long ones last.
    std::optional<ExtentNumber> take(std::uint32_t length, End end, Grid grid = Grid::none);

    // Exactly these extents; false if one of them is not free.
    bool take_at(ExtentNumber first, std::uint32_t length);

    // Extents that were taken, or are new. They join free neighbours.
    void give(ExtentNumber first, std::uint32_t length);

    std::uint32_t total() const noexcept { return total_; }
    std::uint32_t longest() const noexcept { return by_length_.empty() ? 0 : by_length_.rbegin()->first; }
    const ByPlace& by_place() const noexcept { return by_place_; }

private:
    std::optional<ExtentNumber> take_on_grid(std::uint32_t length, End end);
    std::optional<ExtentNumber> cell_in(ExtentNumber first, std::uint32_t run_length, std::uint32_t length,
                                        End end) const;
    void insert(ExtentNumber first, std::uint32_t length);
    ByPlace::iterator erase(ByPlace::iterator run);

    std::uint32_t extents_per_segment_;
    std::uint32_t total_ = 0;
    ByPlace by_place_;
    std::set<std::pair<std::uint32_t, ExtentNumber>> by_length_;
};

// The outcome of a claim to one certain slot.
enum class Claim : std::uint8_t {
    granted,
    taken,      // another entry has it
    misplaced,  // no span of this size can be there
};

struct SlotPool {
    explicit SlotPool(std::uint32_t extents_per_segment_) noexcept
        : extents_per_segment(extents_per_segment_), spans(extents_per_segment_), runs(extents_per_segment_) {}

    // Behind those that are there; a segment may come in parts.
    void add_extents(std::uint32_t count);
    std::optional<Slot> allocate(ClassNumber number, EntryNumber owner);
    Claim claim(ClassNumber number, Slot slot, EntryNumber owner);
    void release(Slot slot);

    void begin_move(Slot from, Slot to) noexcept;
    // The record leaves one of the two places.
    void end_move(Slot from, Slot to, Slot left);

    // Takes the extents from this one on, the first of a segment, out of use: no slot is given there any more, and
    // those that are given back leave no room. No move may be planned.
    void withdraw(ExtentNumber first);
    // Takes them back into use.
    void restore();
    // Drops those withdrawn segments above which, and in which, there is no record. Returns how many extents went.
    std::uint32_t cut();
    bool has_withdrawn() const noexcept { return withdrawn != kNone; }

    static constexpr ExtentNumber kNone = 0xffffffff;

    std::uint32_t extents_per_segment;
    ExtentNumber withdrawn = kNone;  // the first of those that are out of use
    SpanTable spans;
    FreeRuns runs;

private:
    void remove_if_empty(ExtentNumber first);
};

}  // namespace kvo
