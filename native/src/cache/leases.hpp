// Leases: entries are pinned for their readers, checked if necessary, and let go.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/cache_memory.hpp"
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
    over_limit,  // the session is not open, or it, its user or a blocks' tenant would hold more than they may
    no_room,     // the index cannot hold another lease
};

// The purpose of a lease. If a tier reads or keeps a block, that does not count as a use of it.
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

// The shards whose digests are wanted with a lease.
using Shards = std::span<const std::uint32_t>;

// Read by any thread.
struct LeaseCounts {
    std::atomic<std::uint64_t> hits = 0;  // acquires with a boundary beyond what the engine had
    std::atomic<std::uint64_t> misses = 0;
    std::atomic<std::uint64_t> refused = 0;
    std::atomic<std::uint64_t> mismatches = 0;  // records whose bytes were not what their digest says
};

// A block that a request names more than once is leased once. Safe to call from any thread. Takes the locks of sessions
// and of lease lists, each for an instant; the writer's only to take away the name of a damaged entry, or when it is
// free.
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
        std::span<const Found> wanted;     // group after group, as they are answered
        std::vector<EntryNumber> entries;  // of them, each once
        std::vector<BlockRange> ranges;    // by group
        std::uint64_t bytes = 0;           // of the entries
        bool is_request = true;            // one request's entries in their order; false: any entries
        LeaseFor purpose = LeaseFor::use;
    };
    enum class Pin : std::uint8_t { held, gone, damaged, over_quota };

    Pin pin_all(Pinned& pinned);
    Pin pin(const Found& wanted, bool& is_first);
    void unpin(std::span<const EntryNumber> entries);
    Pin check_pinned(std::span<const EntryNumber> entries, LeaseFor purpose);
    void remove_damaged(EntryNumber entry);
    bool is_suspect(EntryNumber entry) const;
    std::uint64_t size_of(EntryNumber entry) const;
    Holding count_held(std::span<const EntryNumber> entries, std::uint64_t bytes) const;
    AcquireOutcome refuse();
    AcquireOutcome lease(SessionId session, const Namespace& name_space, const Pinned& pinned, Shards shards,
                         Acquired& acquired);
    void describe(const Namespace& name_space, const Pinned& pinned, Shards shards, Acquired& acquired) const;
    void note_touches(const Pinned& pinned);

    CacheState& state_;
    const Verify verify_;
    LeaseCounts counts_;
};

}  // namespace kvo
