// Where in the pool a run of extents could be emptied by moving few bytes. Decides nothing and changes nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "arena/free_runs.hpp"
#include "arena/span_table.hpp"

namespace kvo {

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

// Of a large pool so many extents are looked at, at most.
constexpr std::uint32_t kExtentsSeen = 256 * 1024;

// At most 32 windows, cheapest first, of different places. In a large pool not all segments are looked at; the emptiest
// come first. About 1 ms at most.
std::vector<Window> cheapest_windows(const SpanTable& spans, const FreeRuns& runs, const RoomQuestion& question);

}  // namespace kvo
