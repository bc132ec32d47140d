// The most hits that any policy can have: Belady's choice, made with the whole trace in view.
//
// Of the resident and just computed blocks, it keeps those whose next request comes soonest, and none that are never
// asked for again. A block is in every request that its children are in, so the farthest block is always a leaf,
// parents outlive children, and for blocks of one size no online or offline order serves more. It is a bound to compare
// with, not a goal: no real cache knows the next request.
#pragma once

#include <cstdint>

#include "replay/replay.hpp"

namespace kvo {

struct OptimalHits {
    std::uint64_t hits = 0;
    std::uint64_t hit_squares = 0;  // of the same choice, as in ReplayOutcome: another one may have more
};

// Blocks served from a cache of `capacity_blocks`, full attention alone.
OptimalHits count_optimal_hits(const ReplayTrace& trace, std::uint64_t capacity_blocks);

}  // namespace kvo
