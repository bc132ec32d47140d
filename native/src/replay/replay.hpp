// Drives a policy with a trace, to find which share of its blocks this much memory would have served.
//
//     request ──► longest boundary that all groups accept ──► touch what it needs
//             ──► spare what else of it is here ──► evict until what is missing fits ──► admit it
//
// Requests run one after the other. Only the running request holds leases, and its leased records are never evicted.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "evict/eviction_policy.hpp"
#include "replay/replay_trace.hpp"

namespace kvo {

// One record of `size_bytes` for every block of a prompt, or for every `every_blocks`-th.
struct ReplayGroup {
    Reuse reuse = Reuse::prefix;
    std::uint64_t size_bytes = 1;
    std::uint32_t window_blocks = 0;  // of Reuse::window
    std::uint32_t every_blocks = 1;   // of Reuse::exact
};

// The groups of a model; the first is the prefix group. Sizes count in units: only their proportions matter here.
using ReplayShape = std::vector<ReplayGroup>;

ReplayShape plain_shape();   // full attention alone
ReplayShape hybrid_shape();  // with a sliding window of 4 blocks, and recurrent states every 8 blocks

// Total size of all distinct records of the trace: a memory of this size would hold everything.
std::uint64_t total_bytes(const ReplayTrace& trace, const ReplayShape& shape);

struct ReplayOutcome {
    std::uint64_t hits = 0;         // blocks below the boundaries
    std::uint64_t hit_squares = 0;  // sum of the boundaries' squares: what hits save grows with their position
    std::uint64_t admitted = 0;
    std::uint64_t evicted = 0;
    std::uint64_t refused = 0;  // records that did not fit next to those that their own request leased
    std::uint64_t peak_bytes = 0;
    std::uint64_t samples = 0;   // taken after the first eviction
    double useless_share = 0.0;  // mean over the samples: bytes that no acquire could make use of
};

// How many entries a policy has to be made for.
PolicyBounds replay_bounds(const ReplayShape& shape, std::uint64_t capacity_bytes);

// `policy` must be new. Code::invalid: the shape is not one; Code::failed: the policy broke its contract.
Result<ReplayOutcome> replay(const ReplayTrace& trace, const ReplayShape& shape, std::uint64_t capacity_bytes,
                             EvictionPolicy& policy);

}  // namespace kvo
