// Leases: entries are pinned for whoever reads them, checked where they have to be, and let go.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/cache_options.hpp"
#include "cache/cache_state.hpp"
#include "index/boundary.hpp"
#include "index/lookup.hpp"

namespace kvo {

// One group's part of a lease: slots of blocks [first, first + addresses.size()).
struct LeasedGroup {
    std::uint64_t first = 0;
    std::vector<std::uint64_t> addresses;  // counted over all segments
    std::vector<std::uint64_t> digests;    // of each shard that was asked for, shard after shard
};

enum class AcquireOutcome : std::uint8_t {
    hit,
    miss,
    over_limit,  // the session is not open, or would hold more than its limit
    no_room,     // the index cannot hold another lease
};

// What a lease is for. A tier's reading or keeping of a block says nothing of its use.
enum class LeaseFor : std::uint8_t {
    use,
    upkeep,
    keep,  // its bytes are read under other leases only, so they are checked by those
};

struct Acquired {
    AcquireOutcome outcome = AcquireOutcome::miss;
    std::uint64_t boundary = 0;  // tokens
    LeaseId lease = 0;           // 0 in a hit: no block is needed up to there, and there is nothing to release
    std::vector<LeasedGroup> groups;
};

// Whose digests are wanted with a lease.
using Shards = std::span<const std::uint32_t>;

// Read by any thread.
struct LeaseCounts {
    std::atomic<std::uint64_t> hits = 0;  // acquires with a boundary beyond what the engine had
    std::atomic<std::uint64_t> misses = 0;
    std::atomic<std::uint64_t> refused = 0;
    std::atomic<std::uint64_t> mismatches = 0;  // records whose bytes were not what their digest says
};

// Safe to call from any thread. Takes the locks of sessions and of lease lists, each for an instant; the writer's only
// to take away the name of a damaged entry, or when nobody has it.
class Leases {
public:
    // `state` outlives it.
    Leases(CacheState& state, Verify verify) : state_(state), verify_(verify) {}

    // A lease on exactly the slots that a load up to the longest boundary needs. `shards` chooses the digests.
    Result<Acquired> acquire(SessionId session, const BoundaryQuery& query, Shards shards = {});

    // A lease on these entries, all of them or none (then a miss); `boundary` is left 0. To keep them, no byte is read.
    Result<Acquired> acquire_entries(SessionId session, Space space, std::span<const std::uint8_t> hashes,
                                     Shards shards = {}, LeaseFor purpose = LeaseFor::use);
    // False: the session has no such lease (any more).
    bool release(SessionId session, LeaseId lease);

    const LeaseCounts& counts() const noexcept { return counts_; }

private:
    struct Pinned {
        std::vector<EntryNumber> entries;
        std::vector<BlockRange> ranges;  // by group
        std::uint64_t bytes = 0;
        bool is_request = true;  // its entries follow each other; else they are anybody's
        LeaseFor purpose = LeaseFor::use;
    };
    enum class Pin : std::uint8_t { held, gone, damaged };

    Pin pin_all(std::span<const Found> wanted, std::vector<EntryNumber>& pinned, LeaseFor purpose);
    Pin pin(const Found& wanted);
    void unpin(std::span<const EntryNumber> entries);
    Pin check_pinned(std::span<const EntryNumber> entries, LeaseFor purpose);
    void remove_damaged(EntryNumber entry);
    bool is_suspect(EntryNumber entry) const;
    AcquireOutcome lease(SessionId session, const Namespace& name_space, const Pinned& pinned, Shards shards,
                         Acquired& acquired);
    void describe(const Namespace& name_space, const Pinned& pinned, Shards shards, Acquired& acquired) const;
    void note_touches(const Pinned& pinned);

    CacheState& state_;
    const Verify verify_;
    LeaseCounts counts_;
};

}  // namespace kvo
