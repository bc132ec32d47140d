// What a cache is made with: how much memory, whose, and who shares it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "arena/populate.hpp"
#include "arena/segment.hpp"
#include "cache/tenant_table.hpp"
#include "evict/prefix_policy.hpp"

namespace kvo {

constexpr std::uint64_t kPoolLimit = 1ULL << 56;  // more than any machine has

enum class Verify : std::uint8_t {
    adopted,  // a record that a dead process left, at its first use
    always,   // every record, at every use
};

// Whose a cache is. Its successors are of the same domain.
struct CacheOwner {
    std::string domain = {};
    std::uint64_t boot_id = 0;  // of the process that writes, as its engines know it; 0: none that anybody knows
    std::optional<std::vector<std::uint32_t>> users = {};  // who may have it mapped; none: anybody
};

struct CacheOptions {
    std::uint64_t pool_bytes = 0;  // rounded up to whole segments
    std::uint64_t segment_bytes = 1ULL << 30;
    std::uint64_t extent_bytes = 1ULL << 20;
    EntryNumber entry_limit = 0;
    MakePolicy policy = make_prefix_policy;
    Verify verify = Verify::adopted;
    HugePages huge_pages = HugePages::transparent;
    PlacementWish placement{.placement = Placement::interleave};  // ranks of all nodes use the pool
    PopulateTerms populate;
    std::uint64_t step_bytes = 128ULL << 20;  // the pool's first part, and how much it grows at once
    CacheOwner owner = {};
    std::uint64_t former_boot_id = 0;  // of a successor: the process whose memory it takes over; 0: whoever's
    bool is_sparse = false;            // pages come at the first touch: for tests of pools larger than the machine
    // Of a successor: who shares the pool from then on. What others had left is nobody's. None: whoever shared it
    // before.
    std::optional<std::vector<TenantTerms>> tenants = {};
};

}  // namespace kvo
