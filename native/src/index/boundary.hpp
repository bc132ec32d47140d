// How far a prefix may be reused: the longest boundary that every group accepts.
//
// A request has one chain of hashes, one for every `hash_block_size` tokens. A group's block has the name that covers
// its last token, so all groups' keys come out of that one chain.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "index/lookup.hpp"

namespace kvo {

enum class BoundaryRule : std::uint8_t {
    prefix,   // every block before the boundary
    window,   // the blocks with the last `window` tokens that the next token sees
    chunk,    // the blocks from the last multiple of `window` tokens on
    exact,    // the one block that ends at the boundary
    nothing,  // never loaded, needs nothing
};

struct GroupGeometry {
    std::uint64_t record_bytes = 0;  // of one shard
    std::uint32_t block_size = 0;    // tokens
    std::uint32_t window = 0;        // tokens
    std::uint32_t shards = 1;
    BoundaryRule rule = BoundaryRule::prefix;

    std::uint64_t slot_bytes() const { return record_bytes * shards; }
    bool operator==(const GroupGeometry&) const = default;
};

struct Geometry {
    std::uint32_t hash_block_size = 0;  // tokens
    std::vector<GroupGeometry> groups;

    bool operator==(const Geometry&) const = default;
};

// Code::invalid with one line that names the group if it cannot be served.
Status check_geometry(const Geometry& geometry);

// Positions [first, end) of a group's blocks.
struct BlockRange {
    std::uint64_t first = 0;
    std::uint64_t end = 0;

    std::uint64_t count() const { return end - first; }
    bool operator==(const BlockRange&) const = default;
};

// The blocks that a load up to `boundary` must bring when the engine has `local` tokens itself.
BlockRange needed_blocks(const GroupGeometry& group, std::uint64_t local, std::uint64_t boundary);

struct BoundaryQuery {
    std::uint32_t name_space = 0;
    std::span<const std::uint8_t> chain;  // 32 bytes a hash, from the request's first token on
    std::uint64_t local = 0;              // tokens that the engine has itself
    std::uint64_t limit = 0;              // tokens; no boundary beyond it
    std::uint64_t alignment = 1;          // tokens; boundaries are multiples of it
};

// Searches for a boundary, and keeps the entries that it found, so that the caller need not look them up again.
class BoundarySearch {
public:
    // The largest boundary in (local, limit] that all groups accept; `local` if there is none.
    std::uint64_t find(const IndexView& view, const Geometry& geometry, const BoundaryQuery& query);

    // After `find`: the entry of a needed block.
    const Found& found(std::size_t group, std::uint64_t position) const {
        return groups_[group].found[position - groups_[group].first];
    }

private:
    struct GroupFinds {
        std::uint64_t first = 0;  // position of found[0]
        std::vector<Found> found;
        std::vector<std::uint32_t> run;  // how many found blocks end at this one
    };

    std::uint64_t find_prefix(const IndexView& view, const Geometry& geometry, const BoundaryQuery& query,
                              std::size_t group, std::uint64_t boundary);
    void find_all(const IndexView& view, const Geometry& geometry, const BoundaryQuery& query, std::size_t group,
                  std::uint64_t boundary);
    bool accepts(const GroupGeometry& group, const GroupFinds& finds, std::uint64_t local,
                 std::uint64_t boundary) const;

    std::vector<GroupFinds> groups_;
};

}  // namespace kvo
