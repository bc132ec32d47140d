// On which NUMA nodes the pages of a mapping are to lie, by the kernel's own calls (libnuma is not needed).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
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

// Which processors are near memory, and keeping a thread on them.

// The processors that the calling thread may run on, ascending. Empty if they are not known.
std::vector<unsigned> thread_cpus();

// The processors of the NUMA nodes that these bytes lie on, ascending; addresses without memory are left out. Empty:
// the machine has one node only, or nothing is known.
std::vector<unsigned> cpus_near(std::span<const std::uint64_t> addresses, const std::filesystem::path& sysfs = "/sys");

// The processors of these NUMA nodes, ascending. A node of memory alone has none.
std::vector<unsigned> cpus_of_nodes(const std::vector<unsigned>& nodes, const std::filesystem::path& sysfs = "/sys");

// Returns the processors of `own` that are near, or all of `own` if none is near or nothing is known. A pure function.
std::vector<unsigned> choose_cpus(const std::vector<unsigned>& own, const std::vector<unsigned>& near);

// The numbers in a line such as "0-3,8,10-11". Pure; empty if the line is of another kind.
std::vector<unsigned> parse_cpu_list(std::string_view line);

// Restricts the calling thread to these processors. Returns false, and changes nothing, if the kernel refuses.
bool keep_thread_on(const std::vector<unsigned>& cpus);

}  // namespace kvo
