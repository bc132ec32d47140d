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

// The most extents that a search of a large pool looks at.
constexpr std::uint32_t kExtentsSeen = 256 * 1024;

// Returns at most 32 windows in different places, cheapest first. In a large pool it looks at the emptiest segments
// first, and not at all of them. Takes about 1 ms at most.
std::vector<Window> cheapest_windows(const SpanTable& spans, const FreeRuns& runs, const RoomQuestion& question);

}  // namespace kvo
