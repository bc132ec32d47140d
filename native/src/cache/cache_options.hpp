// Options of a cache: how much memory it has, its owner, and the tenants that share it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "arena/segment.hpp"
#include "cache/tenant_table.hpp"
#include "evict/prefix_policy.hpp"

namespace kvo {

constexpr std::uint64_t kPoolLimit = 1ULL << 56;  // more than any machine has

enum class Verify : std::uint8_t {
    adopted,  // a record that a dead process left, at its first use
    always,   // every record, at every use
};

// The owner of a cache. Its successors are of the same domain.
struct CacheOwner {
    std::string domain = {};
    std::uint64_t boot_id = 0;  // number by which engines know the process that writes; 0: they know none
    std::optional<std::vector<std::uint32_t>> users = {};  // users that may map it; none: every user
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
    std::uint64_t former_boot_id = 0;  // of a successor: the process whose memory it takes over; 0: any
    bool is_sparse = false;            // pages come at the first touch: for tests of pools larger than the machine
    // For a successor: the tenants that share the pool from now on. Blocks of other former tenants then belong to no
    // tenant. None: the same tenants as before.
    std::optional<std::vector<TenantTerms>> tenants = {};
};

}  // namespace kvo
