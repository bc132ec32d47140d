// Drives a policy with a trace, to find which share of its blocks this much memory would have served.
//
//     request ──► longest boundary that all groups accept ──► touch what it needs
//             ──► spare what else of it is here ──► evict until what is missing fits ──► admit it
//
// Requests run one after the other. Only the running request holds leases, and its leased records are never evicted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.hpp"
#include "evict/eviction_policy.hpp"

namespace kvo {

// The requests of a trace, packed for being replayed many times: four bytes a reference.

// Blocks are numbered in the order they first appear, so a parent's number is below its children's.
using BlockNumber = std::uint32_t;
constexpr BlockNumber kNoBlock = 0xffffffff;

class ReplayTrace {
public:
    // The full blocks of one more request. A block is what it is by its id and all ids before it, as in any prefix
    // cache: an id that follows another one is another block. No ids: no request. Code::invalid beyond 2**32 - 1
    // references.
    Status add(std::span<const std::uint64_t> ids);

    std::size_t request_count() const noexcept { return ends_.size(); }
    std::size_t reference_count() const noexcept { return references_.size(); }
    std::size_t block_count() const noexcept { return parents_.size(); }
    // The sum of the squares of the requests' lengths.
    std::uint64_t reference_squares() const noexcept { return reference_squares_; }

    std::span<const BlockNumber> request(std::size_t at) const noexcept;
    BlockNumber parent(BlockNumber block) const noexcept { return parents_[block]; }
    // Blocks from the start of the prompt to this one, itself included.
    std::uint32_t depth(BlockNumber block) const noexcept { return depths_[block]; }

private:
    struct Key {
        std::uint64_t id;
        BlockNumber parent;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        std::size_t operator()(const Key& key) const noexcept;
    };

    std::vector<BlockNumber> references_;
    std::uint64_t reference_squares_ = 0;
    std::vector<std::uint32_t> ends_;
    std::vector<BlockNumber> parents_;
    std::vector<std::uint32_t> depths_;
    std::unordered_map<Key, BlockNumber, KeyHash> numbers_;
};

// Spreads a number over 64 bits (the finaliser of SplitMix64).
constexpr std::uint64_t spread_bits(std::uint64_t number) noexcept {
    number += 0x9e3779b97f4a7c15;
    number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
    number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
    return number ^ (number >> 31);
}

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

// Finds the resident bytes that some acquire could use: those that any boundary needs which all groups accept.

// `holds` says whether a group's record of a block is resident. Boundaries are multiples of `boundary_blocks`.
std::uint64_t useful_bytes(const ReplayTrace& trace, const ReplayShape& shape, std::uint32_t boundary_blocks,
                           const std::function<bool(std::uint32_t, BlockNumber)>& holds);

}  // namespace kvo
