// Queries about blocks that need no lease on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cache/cache_state.hpp"

namespace kvo {

// A readable entry, as it was at some moment of the walk that found it.
struct EntryFacts {
    HashWords hash{};
    Space space = 0;
    std::uint32_t leases = 0;
    std::optional<std::uint32_t> stored_s = {};  // for how long, if this process stored it
    TenantNumber tenant = 0;
    bool was_used = false;
};

struct EntrySurvey {
    std::uint64_t matches = 0;
    std::vector<EntryFacts> entries;  // as many of them as were wanted
};

// Some readable blocks of one namespace, as they were at some moment of the walk that found them.
struct EntryListing {
    EntryNumber next = 0;  // where the walk goes on; 0: it is over
    std::vector<std::uint64_t> groups;
    std::vector<HashWords> hashes;
    std::vector<HashWords> parents;  // zeros: there is none; its own hash: it is not here, or not known
};

// Safe to call from any thread. What was stored and what departed is the store's to say, under the writer's lock.
class EntrySearch {
public:
    // `state` outlives it.
    explicit EntrySearch(const CacheState& state) : state_(state) {}

    // Whether each block is readable; `found` as long as there are hashes.
    Status lookup(Space space, std::span<const std::uint8_t> hashes, std::span<std::uint8_t> found) const;

    // Whether each block is readable and was acquired for use since it is; `found` as long as there are hashes. With
    // `since`, whether the last time was after `use_clock` said so.
    Status find_used(Space space, std::span<const std::uint8_t> hashes, std::span<std::uint8_t> found,
                     std::optional<std::uint32_t> since = std::nullopt) const;

    // A counter that grows with every acquire for use, and wraps around.
    std::uint32_t use_clock() const { return state_.view.header->clock.load(std::memory_order_relaxed); }

    // Finds what became of blocks that are not there (any more), where that is remembered. `found` has one place per
    // hash.
    Status find_departed(Space space, std::span<const std::uint8_t> hashes,
                         std::span<std::optional<Departed>> found) const;

    // For how many seconds blocks have been readable, where this process made them so; as long as there are hashes.
    Status find_stored(Space space, std::span<const std::uint8_t> hashes,
                       std::span<std::optional<std::uint32_t>> found) const;

    // Finds the values that the eviction policy gives to blocks. `found` is as long as there are hashes, and has the
    // lowest number for a block that is not readable.
    Status find_values(Space space, std::span<const std::uint8_t> hashes, std::span<double> found) const;

    // Readable entries whose hashes begin with these bytes. Takes about 10 ns an entry of the whole index.
    Result<EntrySurvey> survey(std::span<const std::uint8_t> prefix, std::size_t limit) const;

    // The next blocks of a namespace, from this entry on, so many at most. A block that is readable from the beginning
    // of a walk to its end is found by it, once. Looks at `kListPart` entries at most, about 10 ns for each and 100 for
    // each that is found.
    EntryListing list(std::uint32_t name_space, EntryNumber first, std::size_t limit) const;
    static constexpr EntryNumber kListPart = 1u << 14;

private:
    const CacheState& state_;
};

}  // namespace kvo
