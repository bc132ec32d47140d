// The lives of entries, as the one writer changes them: numbers, slots, names, and the choice of entries to evict.
//
// Every change is made so that a process that dies after any instruction leaves entries that are whole: an entry's
// bytes and fields stand before its word says so, and its slot is given to others only after its word has said that it
// is free. Everything else here (free numbers, arena, table, policies) is rebuilt from the entries by `adopt`.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "arena/arena.hpp"
#include "arena/segment.hpp"
#include "cache/curve_feed.hpp"
#include "cache/departures.hpp"
#include "cache/held_shares.hpp"
#include "cache/namespace_table.hpp"
#include "cache/tenant_table.hpp"
#include "evict/entry_lists.hpp"
#include "index/index_file.hpp"
#include "index/table.hpp"

namespace kvo {

// Permission to write to a reserved entry's slot: the entry and the generation it was reserved in. Never 0.
using Ticket = std::uint64_t;
constexpr Ticket make_ticket(EntryNumber entry, std::uint32_t generation) {
    return (static_cast<Ticket>(generation) << 32) | entry;
}
constexpr EntryNumber entry_of(Ticket ticket) { return static_cast<EntryNumber>(ticket); }
constexpr std::uint32_t generation_of(Ticket ticket) { return static_cast<std::uint32_t>(ticket >> 32); }

// The cost of a reservation so far. If it is unfinished, the caller may ask again after it has let others have the
// lock.
struct Effort {
    std::uint64_t evicted_bytes = 0;
    bool is_unfinished = false;
    bool is_quota_used = false;  // whether it was refused because of its tenant's quota, whatever room there is
};

// How far the emptying of withdrawn segments has come.
struct Vacating {
    std::uint64_t kept_bytes = 0;   // room in the segments that stay
    std::uint64_t move_bytes = 0;   // what may still be moved; more is evicted, which is faster
    std::uint64_t next_extent = 0;  // from which on records have not been looked at
};

// How long evicted blocks were there: seconds of each bucket at most, and one bucket for longer.
constexpr std::array<std::uint32_t, 9> kResidenceBounds = {1, 10, 60, 300, 1'800, 7'200, 28'800, 86'400, 604'800};

// Read by any thread.
struct StoreCounts {
    std::atomic<std::uint64_t> readable = 0;
    std::atomic<std::uint64_t> reserved = 0;
    std::atomic<std::uint64_t> quarantined = 0;
    std::atomic<std::uint64_t> used_bytes = 0;                             // slots of all of these, unrounded
    std::array<std::atomic<std::uint64_t>, kNamespaceLimit> used_by = {};  // the same by a namespace's place
    std::atomic<std::uint64_t> evicted = 0;
    std::atomic<std::uint64_t> evicted_bytes = 0;
    std::atomic<std::uint64_t> evicted_unused = 0;  // of them, those that were never loaded
    std::atomic<std::uint64_t> moved_bytes = 0;
    std::array<std::atomic<std::uint64_t>, kResidenceBounds.size() + 1> residence = {};  // of evicted blocks, by bucket
    std::atomic<std::uint64_t> residence_seconds = 0;                                    // of them together
};

// When an entry was stored: seconds of some clock in three bytes, since there are as many of these as entries. They
// come round after half a year.
class StoredAt {
public:
    StoredAt() = default;
    explicit StoredAt(std::uint32_t second) {
        const std::uint32_t told = second % kRound + 1;
        bytes_ = {static_cast<std::uint8_t>(told), static_cast<std::uint8_t>(told >> 8),
                  static_cast<std::uint8_t>(told >> 16)};
    }
    // The seconds from then to `second`, or none if a process before this one stored the entry.
    std::optional<std::uint32_t> seconds_until(std::uint32_t second) const {
        const std::uint32_t told = bytes_[0] | std::uint32_t{bytes_[1]} << 8 | std::uint32_t{bytes_[2]} << 16;
        if (told == 0) {
            return std::nullopt;
        }
        return (second % kRound + kRound + 1 - told) % kRound;
    }

private:
    static constexpr std::uint32_t kRound = (1U << 24) - 1;
    std::array<std::uint8_t, 3> bytes_{};
};
static_assert(sizeof(StoredAt) == 3);

// How a block left the pool.
struct Departed {
    Leaving why = Leaving::evicted;
    std::uint32_t seconds_ago = 0;
    std::uint64_t missing_bytes = 0;  // more memory that would have kept it, about
};

// The name by which policies know an entry.
constexpr std::uint64_t name_of(Space space, std::uint64_t hash_word) {
    return hash_word ^ (std::uint64_t{space} << 32 | space) * 0x9e3779b97f4a7c15;
}

struct AdoptionReport {
    std::uint64_t readable = 0;
    std::uint64_t reserved = 0;  // of sessions that may still write to them
    std::uint64_t dropped = 0;   // half-written, or in contradiction to others
};

// Owned by CacheCore; every call is made under its writer lock. References must outlive it.
class EntryStore {
public:
    EntryStore(IndexFile& index, std::vector<Segment>& segments, const NamespaceTable& namespaces, TenantTable tenants,
               Arena arena);

    // From here on every event is noted in `curve`, which must outlive this.
    void follow_by(CurveFeed& curve) noexcept { curve_ = &curve; }

    // A new index: an empty table.
    Status start();

    // The size class of a group's slots; a record that no segment can hold has none.
    Result<ClassNumber> open_class(Space space);

    // An entry with a slot of this class, reserved for a session. kNoEntry: everything that could go is in use, or
    // memory for the index is short, or the tenant is over its quota and has nothing of its own that could go, or has
    // its whole quota in use.
    EntryNumber reserve(Space space, ClassNumber size_class, TenantNumber tenant, std::uint16_t session,
                        Effort& effort);

    // A reserved entry's bytes are this tenant's from here on.
    void charge(EntryNumber entry, TenantNumber tenant);

    // Makes a reserved entry readable under its name, which must not be taken. If too many names fall together in
    // the table, an unused entry among them is evicted for it. A fault leaves it reserved. `tag` says what its parent
    // is called, whether that is here or not. One that `was_promoted` came from a slower tier.
    Status publish(EntryNumber entry, const HashWords& hash, EntryNumber parent, std::uint16_t tag,
                   bool was_promoted = false);

    // Another entry like this one, whose hash begins with this word, will be published soon.
    void expect(EntryNumber entry, std::uint64_t hash_word);

    // Ends a reserved entry.
    void abort(EntryNumber entry);

    // Takes a readable entry's name away; what is leased stays in quarantine until `end_quarantine`.
    // False: it was not readable any more.
    bool remove(EntryNumber entry, Leaving why);

    // How a block that was here left, if that is remembered.
    std::optional<Departed> find_departed(Space space, std::uint64_t hash_word) const;
    // For how many seconds an entry has been stored, if this process stored it.
    std::optional<std::uint32_t> stored_for(EntryNumber entry) const;

    // Frees a quarantined entry that has no leases any more; does nothing to any other.
    void end_quarantine(EntryNumber entry);

    // More room, behind what is there; its memory is.
    Status add_extents(std::uint64_t count);
    // For this many seconds a reservation that finds no room is refused: room is about to come, so nothing is evicted
    // for it.
    void expect_room(std::uint32_t seconds);

    // Withdraws the segments from this one on: nothing is stored there any more.
    void withdraw(std::uint32_t segment);
    // Does a part of emptying the withdrawn segments, short enough for others to get in between. What is worth least
    // goes, wherever it is, until all else has room in the other segments; then that moves there. Records in use stay.
    // True: there is more to do.
    bool vacate(Vacating& vacating);
    // Ends the pool before those of the withdrawn segments that are empty; their memory is not used any more.
    void cut_withdrawn();
    // Takes the other withdrawn segments back into use.
    void restore_withdrawn();

    // Evicts one entry, which the policies choose. If `wanting` is over its quota or has none, entries of tenants
    // within theirs are spared; without `wanting`, none is. False: no entry can be evicted, or none of the many that
    // were tried.
    bool evict_one(std::optional<TenantNumber> wanting = {});

    void touch(std::span<const EntryNumber> entries);
    // Notes that a save of the blocks behind this one has found it here.
    void spare(EntryNumber entry);
    // Whether a tier below memory has it, too. It may have gone by now.
    void note_tier(EntryNumber entry, bool has);

    // Returns the value that the policy of its tenant gives to a readable entry.
    double value_of(EntryNumber entry) const {
        return tenants_.policy_of(view_.entries[entry].tenant.load(std::memory_order_relaxed)).value_of(entry);
    }

    // Rebuilds everything from the entries that a dead process left. `leases(entry)` is how often the lists of leases
    // name it; `may_write(session)` says whether a process of that session may still write to the slots that it
    // reserved.
    Result<AdoptionReport> adopt(const std::function<std::uint32_t(EntryNumber)>& leases,
                                 const std::function<bool(std::uint16_t)>& may_write);

    TenantTable& tenants() noexcept { return tenants_; }
    const TenantTable& tenants() const noexcept { return tenants_; }
    const Arena& arena() const noexcept { return arena_; }
    const StoreCounts& counts() const noexcept { return counts_; }
    // The log of blocks that are removed; any thread may use it.
    RemovedLog& removed() noexcept { return removed_; }
    // Whether an identity has entries. Any thread may ask. If not, the threads that gave back the last ones are done
    // with the identity's facts, so these may be freed.
    bool has_entries(std::uint32_t name_space) const noexcept {
        return counts_.used_by[place_of_namespace(name_space)].load(std::memory_order_acquire) != 0;
    }

    // All bytes and entries, and those that are not in use, which can be had for others. Any thread may ask.
    Room count_room() const noexcept;

    // The bytes of an entry's slot, all shards' records. The caller has a lease, a reservation or the writer lock.
    std::span<std::byte> slot_bytes(EntryNumber entry) const;
    // Counted over all segments as if they lay one behind the other.
    std::uint64_t slot_address(EntryNumber entry) const;
    // The same of a slot that an entry of this space has.
    std::span<std::byte> bytes_at(Space space, Slot slot) const;
    std::uint64_t address_of(Space space, Slot slot) const;

private:
    // Number of candidates that one policy is asked for in one call: a bound of the time under the lock while very much
    // is leased. Candidates that were tried in vain come last the next time.
    static constexpr int kVictimTries = 8192;
    // For one slot at most this share of the memory is evicted, besides so many of its spans and what may lie in holes
    // that are too few to count; then it is refused.
    static constexpr std::uint64_t kEvictedShare = 32;
    static constexpr std::uint64_t kEvictedSpans = 4;
    static constexpr int kEvictedAtOnce = 512;
    static constexpr std::uint64_t kVacatedAtOnce = 16ULL << 20;  // bytes moved out of withdrawn segments
    // How many parents are followed in search of a block's followed ancestor.
    static constexpr int kAncestors = 4096;
    // Memory that was once too small for all has room again when this share of it is free.
    static constexpr std::uint64_t kRoomShare = 4;

    struct Survivor {
        EntryNumber entry;
        std::uint32_t recency;
    };

    const GroupFacts& facts_of(Space space) const;
    EntryWord word(EntryNumber entry) const;
    bool change_word(EntryNumber entry, EntryWord expected, EntryWord word);
    EntryNumber take_number(bool has_shards);
    void free_number(EntryNumber entry);
    std::optional<Slot> make_slot(ClassNumber size_class, EntryNumber owner, TenantNumber tenant, Effort& effort);
    std::uint64_t eviction_bound(ClassNumber size_class) const;
    bool is_room_coming() const;
    bool make_room(ClassNumber size_class);
    bool move(const Move& record_move);
    bool move_out(Slot slot, ClassNumber size_class, EntryNumber owner);
    void prefetch_next(EntryNumber victim) const;
    bool try_evict(EntryNumber victim);
    bool evict_unused(EntryNumber entry);
    bool evict_rival(EntryNumber entry);
    bool evict_around(const std::function<std::uint32_t(EntryNumber)>& age, std::optional<TenantNumber> wanting);
    void end_reserved(EntryNumber entry);
    void count_used(Space space, std::uint64_t bytes);
    void tell_used();
    void unlink(EntryNumber entry, bool was_evicted);
    void note_departure(EntryNumber entry, Leaving why);
    void note_residence(EntryNumber entry, std::uint32_t now_s);
    void give_back(EntryNumber entry);
    EntryNumber usable_parent(EntryNumber entry) const;
    bool is_orphan(EntryNumber entry) const;
    void admit(EntryNumber entry);
    void note(EntryNumber entry, PoolNote::Kind kind);
    void note_uses(std::span<const EntryNumber> entries);
    ShadowRecord shadow_of(EntryNumber entry) const;
    std::uint64_t followed_ancestor(EntryNumber entry) const;
    void find_orphans(EntryNumber block, const HashWords& hash);
    void admit_in_order(const std::vector<Survivor>& survivors, std::vector<bool>& is_waiting);
    bool adopt_entry(EntryNumber entry, std::uint32_t leases, const std::function<bool(std::uint16_t)>& may_write);
    void adopt_survivors(std::vector<Survivor>& survivors, AdoptionReport& report);

    IndexFile& index_;
    const IndexView& view_;
    std::vector<Segment>& segments_;
    const NamespaceTable& namespaces_;
    TenantTable tenants_;
    Arena arena_;
    Table table_;
    EntryNumber first_free_ = kNoEntry;
    std::vector<EntryNumber> known_;  // of those that are touched, while they are told
    std::uint32_t room_until_s_ = 0;
    std::uint64_t orphans_ = 0;
    bool is_full_ = false;  // what is reserved takes the room of others
    StoreCounts counts_;
    Departures departures_;
    RemovedLog removed_;
    CurveFeed* curve_ = nullptr;
    ChunkedArray<StoredAt> stored_at_;  // by entry
};

}  // namespace kvo
