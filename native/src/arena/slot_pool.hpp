// Spans and free extents together: a span is made when a size runs out of holes, and gone when its last record is.
#pragma once

#include <cstdint>
#include <optional>

#include "arena/free_runs.hpp"
#include "arena/span_table.hpp"

namespace kvo {

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

    std::uint32_t extents_per_segment;
    SpanTable spans;
    FreeRuns runs;

private:
    void remove_if_empty(ExtentNumber first);
};

}  // namespace kvo
