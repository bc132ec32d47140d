// Where the regions of an index file lie once it is mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.hpp"
#include "index/layout.hpp"

namespace kvo {

// The sizes for which a new index is made.
struct IndexBounds {
    EntryNumber entry_limit = 0;
    std::uint64_t segment_bytes = 0;
    std::uint64_t extent_bytes = 0;
};

struct Region {
    std::uint64_t offset = 0;
    std::uint64_t item_bytes = 0;
    std::uint64_t item_limit = 0;

    std::uint64_t end() const { return offset + item_bytes * item_limit; }
};

// Follows from the entry limit alone, so every process computes the same.
struct IndexRegions {
    Region tenants;
    Region buckets;   // the table proper grows upwards from number 0
    Region overflow;  // the buckets behind `buckets.item_limit`, in the same numbering
    Region entries;
    Region digests;
    Region shard_digests;
    Region namespaces;
    Region sessions;
    Region lease_nodes;
    std::uint64_t file_bytes = 0;
};
IndexRegions plan_regions(EntryNumber entry_limit);

// Pointers into one mapping; does not own it. Of a read-only mapping only the atomics may be loaded.
struct IndexView {
    IndexHeader* header = nullptr;
    TenantRecord* tenants = nullptr;
    Bucket* buckets = nullptr;
    Entry* entries = nullptr;
    EntryDigest* digests = nullptr;
    ShardDigests* shard_digests = nullptr;
    NamespaceRecord* namespaces = nullptr;
    SessionRecord* sessions = nullptr;
    LeaseNode* lease_nodes = nullptr;
    IndexRegions regions;
};

// Writes the header of a new index into zeroed memory.
void format_index(std::byte* base, const IndexBounds& bounds, std::uint64_t seed);

// Code::invalid if the mapping does not hold an index of this format, or one that contradicts its own size.
Result<IndexView> view_index(std::span<std::byte> mapping);

}  // namespace kvo
