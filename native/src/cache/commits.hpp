// Commits: entries that were written to become readable under their names, once every shard has said so.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/reservations.hpp"

namespace kvo {

enum class CommitOutcome : std::uint8_t {
    readable,    // the entry can be acquired now
    incomplete,  // other shards are awaited
    duplicate,   // another writer's entry was first; the slot is taken back
    stale,       // the ticket is not valid (any more); nothing was changed
    refused,     // the index has no room for the name; the slot is taken back
};

// One shard's records of several entries of one group. `hashes` and `parents` are 32 bytes an entry; a parent of zeros
// is none, and no parents at all are none either. Parents lie in the same group, or, for windows and states, in the
// first prefix group. Without digests the cache makes them itself, which reads the records once.
struct CommitBatch {
    Space space = 0;
    std::uint32_t shard = 0;
    std::span<const Ticket> tickets;
    std::span<const std::uint8_t> hashes;
    std::span<const std::uint8_t> parents;
    std::span<const std::uint64_t> digests;
    std::optional<TenantNumber> tenant = {};  // charged from here on; none: the one that reserved stays charged
    bool was_promoted = false;                // from a slower tier
};

// The same, with what it points to.
struct OwnedBatch {
    Space space = 0;
    std::uint32_t shard = 0;
    std::vector<Ticket> tickets = {};
    std::vector<std::uint8_t> hashes = {};
    std::vector<std::uint8_t> parents = {};
    std::vector<std::uint64_t> digests = {};
    bool was_promoted = false;
};

// The result of a call that was left at the writer's lock. The other members may be read once `is_done` is true.
struct LeftCommit {
    std::atomic<bool> is_done = false;
    Status status = {};
    std::vector<CommitOutcome> outcomes = {};
};

// Safe to call from any thread. Entries get their names under the writer's lock, in parts short enough for others to
// get in between.
class Commits {
public:
    // Both outlive it.
    Commits(CacheState& state, Reservations& reservations) : state_(state), reservations_(reservations) {}

    Status commit(SessionId session, const CommitBatch& batch, std::span<CommitOutcome> outcomes);
    // The same for a thread that never waits for the writer's lock, see Reservations. Every record comes with its
    // digest.
    std::shared_ptr<const LeftCommit> leave_commit(SessionId session, OwnedBatch owned);

    // Entries of which another writer's was first.
    std::uint64_t duplicates() const noexcept { return duplicates_.load(std::memory_order_relaxed); }

private:
    struct LeftJob;
    struct Committing {
        SessionId session = 0;
        CommitBatch batch = {};
        std::span<CommitOutcome> outcomes = {};
        NamespaceUse name_space = {};
        bool is_open = false;
        std::size_t next = 0;
        Status status = {};
    };

    Status begin(Committing& committing) const;
    bool commit_next(Committing& committing, std::span<const std::uint64_t> digests);
    void make_left(const std::shared_ptr<LeftJob>& job);
    CommitOutcome commit_one(const CommitBatch& batch, std::size_t item, std::uint64_t digest,
                             const Namespace& name_space, EntryNumber before);
    EntryNumber find_parent(const CommitBatch& batch, std::size_t item, const Namespace& name_space,
                            EntryNumber before) const;
    static std::uint16_t find_parent_tag(const CommitBatch& batch, std::size_t item);
    std::uint64_t digest_item(std::uint16_t place, const CommitBatch& batch, std::size_t item) const;

    CacheState& state_;
    Reservations& reservations_;
    std::atomic<std::uint64_t> duplicates_ = 0;
};

}  // namespace kvo
