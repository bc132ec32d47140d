// On which NUMA nodes the pages of a mapping are to lie, by the kernel's own calls (libnuma is not needed).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.hpp"

namespace kvo {

enum class Placement : std::uint8_t {
    local,       // near the thread that asks
    interleave,  // page by page over all nodes
    one_node,
};

struct PlacementWish {
    Placement placement = Placement::local;
    unsigned node = 0;  // of one_node
};

// The placement to ask the kernel for. Nodes are preferred, not required: a full node must slow the copies, not kill
// the process.
struct PlacementPlan {
    bool is_needed = false;
    int mode = 0;                 // the kernel's MPOL_ number
    std::vector<unsigned> nodes;  // ascending
    std::string reason;           // why nothing is asked
};

// A pure function. `allowed`: the nodes this process may use, ascending. If they are not known it is empty, and
// `why_unknown` says why. Code::invalid: one_node names a node that is not allowed.
Result<PlacementPlan> plan_placement(PlacementWish wish, const std::vector<unsigned>& allowed, unsigned current_node,
                                     const std::string& why_unknown);

// Sets the policy of the pages not given yet in a shared mapping, and with it of its file, for every process.
// The string is empty if it was done, otherwise it says why nothing was: one node only, or a sandbox that forbids it.
Result<std::string> place_pages(void* start, std::size_t length, PlacementWish wish);

}  // namespace kvo
