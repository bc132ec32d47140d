// The cache: entries in shared segments, found by key, leased to readers, given up in the policy's order.
//
//     reserve ──► ticket ──► commit of each shard ──► readable ──► acquire ──► lease ──► release
//                   └──► abort                           └──► evict, invalidate, clear
//
// Reservations, commits and evictions share a lock. Look-ups take none, acquires those of sessions and leases, which
// are held for an instant. One trust domain: a process that may map the cache's files may read all of it.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "arena/segment.hpp"
#include "cache/cache_memory.hpp"
#include "cache/cache_state.hpp"
#include "cache/commits.hpp"
#include "cache/entry_search.hpp"
#include "cache/leases.hpp"
#include "cache/pool_growth.hpp"
#include "cache/removals.hpp"
#include "cache/reservations.hpp"

namespace kvo {

struct CacheStats {
    std::uint64_t capacity_bytes = 0;  // of all segments, when the cache has grown fully
    std::uint64_t ready_bytes = 0;     // that have their memory
    std::uint64_t used_bytes = 0;
    std::uint64_t readable = 0;
    std::uint64_t reserved = 0;
    std::uint64_t quarantined = 0;
    std::uint64_t leases = 0;
    std::uint64_t sessions = 0;
    std::uint64_t namespaces = 0;
    std::uint64_t hits = 0;  // acquires with a boundary beyond what the engine had
    std::uint64_t misses = 0;
    std::uint64_t refused = 0;  // acquires and reservations that found everything in use
    std::uint64_t duplicates = 0;
    std::uint64_t evicted = 0;
    std::uint64_t evicted_unused = 0;  // of them, those that were never loaded
    std::uint64_t mismatches = 0;      // records whose bytes were not what their digest says
    std::uint64_t moved_bytes = 0;
    std::uint64_t lost_touches = 0;
    std::uint64_t index_bytes = 0;         // memory the index has taken
    std::vector<std::uint64_t> residence;  // evicted blocks by how long they were there, see kResidenceBounds
    std::uint64_t residence_seconds = 0;
    std::vector<TenantTable::Usage> tenants;
};

class CacheCore {
public:
    // Makes all segments, and takes the memory of the first step: the cache can be used, and its files handed over. The
    // rest comes with `growth`. Blocks for about half a second per GiB of that step; `progress` may be watched and
    // cancelled by another thread. Code::unavailable: memory is short, with what was asked and what bounds it.
    static Result<std::unique_ptr<CacheCore>> create(const CacheOptions& options, PopulateProgress& progress);

    // Takes over the files of a process that has ended, as far as it had grown. Code::unavailable: it has not ended, or
    // another was faster. Of `options` what concerns the memory's files does not count. Takes the descriptors in any
    // case.
    static Result<std::unique_ptr<CacheCore>> adopt(CacheFiles files, const CacheOptions& options);
    const AdoptionReport& adoption() const noexcept { return adoption_; }

    CacheMemory& memory() noexcept { return *memory_; }
    const CacheMemory& memory() const noexcept { return *memory_; }
    PoolGrowth& growth() noexcept { return growth_; }

    // The index's, for one process that belongs to the session, see IndexFile::open_signed.
    // `heeds`: the process knows that memory may be given back.
    Result<FileDescriptor> open_index(SessionId session, bool heeds = true);

    Result<TenantNumber> open_tenant(const std::string& name, std::uint64_t quota_bytes);

    NamespaceTable& namespaces() noexcept { return state_.namespaces; }
    Leases& leases() noexcept { return leases_; }
    Reservations& reservations() noexcept { return reservations_; }
    Commits& commits() noexcept { return commits_; }
    Removals& removals() noexcept { return removals_; }
    const EntrySearch& search() const noexcept { return search_; }
    // How many hits less and more memory would bring. What was acquired counts at once, but for a writer at work.
    MemoryCurve::Counts memory_curve();
    RemovedLog& removed() noexcept { return state_.store.removed(); }
    SessionTable& sessions() noexcept { return state_.sessions; }
    // Takes back what sessions held all of whose processes have exited; how many sessions ended by this. Call it from
    // time to time, and when a pidfd becomes readable. It never waits for the writer's lock: what takes longer is over
    // by one of the next calls.
    std::size_t reclaim_ended();

    // For tests of those who never wait for it.
    std::unique_lock<WriterLock> hold_writer();

    CacheStats stats() const;
    // The bytes of a namespace's slots, and those of all namespaces that have any, which takes longer.
    std::uint64_t used_by(std::uint32_t name_space) const;
    std::vector<std::pair<std::uint32_t, std::uint64_t>> used_by_each() const;
    std::uint64_t version() const noexcept {
        return state_.view.header->version_counter.load(std::memory_order_acquire);
    }

private:
    CacheCore(std::unique_ptr<CacheMemory> memory, const CacheOptions& options, TenantTable tenants, Arena arena);
    static Result<std::unique_ptr<CacheCore>> assemble(std::unique_ptr<CacheMemory> memory,
                                                       const CacheOptions& options);
    bool reclaim(SessionId session);

    const std::unique_ptr<CacheMemory> memory_;
    CurveFeed curve_;
    CacheState state_;
    AdoptionReport adoption_;

    std::mutex reclaiming_;  // taken before the writer's
    PoolGrowth growth_;
    Leases leases_;
    Reservations reservations_;
    Commits commits_;
    Removals removals_;
    EntrySearch search_;
};

}  // namespace kvo
