// Making room for one more span by moving records together, so that memory that is free in pieces is not lost.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "arena/slot_pool.hpp"
#include "arena/span_table.hpp"

namespace kvo {

// Where in the pool a run of extents could be emptied by moving few bytes. Decides nothing and changes nothing.

// Extents in a row of which some are free and the others serve spans. Only the last span may reach past its end.
struct Window {
    ExtentNumber first = 0;
    std::uint32_t extents = 0;
    std::uint64_t live_bytes = 0;  // of all spans in it: what would have to move
};

struct RoomQuestion {
    std::uint32_t extents = 0;
    std::uint32_t extents_per_segment = 0;
    std::uint64_t bytes_limit = 0;  // windows with more than this are of no use
    // Windows this cheap are good enough to end the search of a large pool early.
    std::uint64_t bytes_enough = 0;
    // Only windows with a whole cell of the grid that FreeRuns knows; they may be longer.
    bool is_on_grid = false;
};

// The most extents that a search of a large pool looks at.
constexpr std::uint32_t kExtentsSeen = 256 * 1024;

// Returns at most 32 windows in different places, cheapest first. In a large pool it looks at the emptiest segments
// first, and not at all of them. Takes about 1 ms at most.
std::vector<Window> cheapest_windows(const SpanTable& spans, const FreeRuns& runs, const RoomQuestion& question);

// `to` is taken already; both places are the owner's until the move is finished or cancelled.
struct Move {
    EntryNumber owner = kNoEntry;
    Slot from;
    Slot to;

    bool operator==(const Move&) const = default;
};

// After its moves either the span that was asked for can be made, or there are more free extents than before and
// another plan can be asked for.
struct RoomPlan {
    std::vector<Move> moves;
    std::uint64_t bytes = 0;  // of all slots that move
};

class RoomPlanner {
public:
    // is_movable(owner): false for records in use. It must not change while the planner is at work.
    RoomPlanner(SlotPool& pool, std::uint64_t extent_bytes, const std::function<bool(EntryNumber)>& is_movable)
        : pool_(pool), extent_bytes_(extent_bytes), is_movable_(is_movable) {}

    // No moves: there is no way. Then nothing has changed.
    RoomPlan plan(ClassNumber number);

private:
    bool empty_any(const RoomQuestion& question);
    bool empty_window(const Window& window);
    bool has_places(const std::vector<ExtentNumber>& touched, std::uint32_t free_elsewhere) const;
    bool gather(std::uint32_t extents);
    bool is_drainable(ExtentNumber first);
    bool displace(const std::vector<ExtentNumber>& touched);
    void take_back();

    SlotPool& pool_;
    std::uint64_t extent_bytes_;
    const std::function<bool(EntryNumber)>& is_movable_;
    std::uint64_t bytes_limit_ = 0;
    std::vector<ExtentNumber> pinned_;  // spans that were found to hold a record in use
    RoomPlan plan_;
};

}  // namespace kvo
