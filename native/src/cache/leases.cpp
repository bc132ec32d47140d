// Acquiring and releasing: from any thread, and without the writer's lock unless something is wrong with an entry.
#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

#include "base/memory_order.hpp"
#include "base/spin.hpp"
#include "cache/cache_state.hpp"
#include "cache/leases.hpp"

namespace kvo {
namespace {

// An acquire that finds entries gone or damaged between its look and its hold looks again.
constexpr int kLooks = 64;

// The entries of a request so far, each once. Belongs to one thread.
class DistinctEntries {
public:
    void begin(std::size_t count) {
        places_.assign(std::bit_ceil(2 * count), kNoEntry);
        shift_ = 64 - std::countr_zero(places_.size());
    }
    bool add(EntryNumber entry) {
        std::size_t place = (entry * 0x9e3779b97f4a7c15ull) >> shift_;
        for (; places_[place] != kNoEntry; place = (place + 1) % places_.size()) {
            if (places_[place] == entry) {
                return false;
            }
        }
        places_[place] = entry;
        return true;
    }

private:
    std::vector<EntryNumber> places_;
    int shift_ = 0;
};

// Adds up entries whose first lease begins, or whose last one ends, and tells of those of one tenant at once.
class HeldSum {
public:
    using Note = bool (TenantTable::*)(TenantNumber, std::uint64_t, std::uint64_t) noexcept;

    HeldSum(TenantTable& tenants, Note note) : tenants_(tenants), note_(note) {}

    void add(TenantNumber tenant, std::uint64_t bytes) {
        if (tenant != tenant_) {
            tell();
            tenant_ = tenant;
        }
        bytes_ += bytes;
        ++entries_;
    }
    // False: a tenant has more in use than it may.
    bool tell() {
        if (entries_ != 0) {
            may_hold_ = (tenants_.*note_)(tenant_, bytes_, entries_) && may_hold_;
            bytes_ = entries_ = 0;
        }
        return may_hold_;
    }

private:
    TenantTable& tenants_;
    const Note note_;
    TenantNumber tenant_ = 0;
    std::uint64_t bytes_ = 0;
    std::uint64_t entries_ = 0;
    bool may_hold_ = true;
};

}  // namespace

Result<Acquired> Leases::acquire(SessionId session, const BoundaryQuery& query, Shards shards) {
    const NamespaceUse name_space = state_.namespaces.use(query.name_space);
    if (!name_space) {
        return Status(Code::invalid, "no namespace has number " + std::to_string(query.name_space));
    }
    if (query.chain.size() % kHashBytes != 0 || query.alignment == 0) {
        return Status(Code::invalid, "a chain has 32 bytes a hash, and an alignment at least 1 token");
    }
    thread_local BoundarySearch search;
    thread_local std::vector<Found> wanted;
    const Geometry& geometry = name_space->geometry;
    Acquired acquired;
    acquired.boundary = query.local;
    for (int look = 0; look < kLooks; ++look) {
        const std::uint64_t boundary = search.find(state_.view, geometry, query);
        if (boundary == query.local) {
            break;
        }
        Pinned pinned;
        wanted.clear();
        for (std::size_t group = 0; group < geometry.groups.size(); ++group) {
            const BlockRange range = needed_blocks(geometry.groups[group], query.local, boundary);
            pinned.ranges.push_back(range);
            for (std::uint64_t position = range.first; position < range.end; ++position) {
                wanted.push_back(search.found(group, position));
            }
        }
        pinned.wanted = wanted;
        const Pin pin = pin_all(pinned);
        if (pin == Pin::gone || pin == Pin::damaged) {
            continue;
        }
        acquired.outcome = pin == Pin::held ? lease(session, *name_space, pinned, shards, acquired) : refuse();
        if (acquired.outcome == AcquireOutcome::hit) {
            acquired.boundary = boundary;
        }
        return acquired;
    }
    counts_.misses.fetch_add(1, kRelaxed);
    return acquired;
}

Result<Acquired> Leases::acquire_entries(SessionId session, Space space, std::span<const std::uint8_t> hashes,
                                         Shards shards, LeaseFor purpose) {
    const NamespaceUse name_space = state_.use_space(space);
    if (!name_space || hashes.size() % kHashBytes != 0) {
        return Status(Code::invalid, "no such group, or hashes that have not 32 bytes each");
    }
    std::vector<Found> wanted(hashes.size() / kHashBytes);
    Acquired acquired;
    for (int look = 0; look < kLooks && !wanted.empty(); ++look) {
        find_entries(state_.view, space, hashes, 1, wanted);
        if (std::ranges::any_of(wanted, [](const Found& found) { return found.entry == kNoEntry; })) {
            break;
        }
        Pinned pinned;
        pinned.is_request = false;
        pinned.purpose = purpose;
        pinned.wanted = wanted;
        const Pin pin = pin_all(pinned);
        if (pin == Pin::damaged && purpose == LeaseFor::upkeep) {
            break;  // it may have its name a while longer
        }
        if (pin == Pin::gone || pin == Pin::damaged) {
            continue;
        }
        pinned.ranges.resize(name_space->groups.size());
        pinned.ranges[group_of(space)] = {0, wanted.size()};
        acquired.outcome = pin == Pin::held ? lease(session, *name_space, pinned, shards, acquired) : refuse();
        return acquired;
    }
    counts_.misses.fetch_add(purpose == LeaseFor::use ? 1 : 0, kRelaxed);
    return acquired;
}

bool Leases::release(SessionId session, LeaseId lease) {
    std::vector<EntryNumber> entries;
    if (!state_.lease_lists.close(lease, session, entries)) {
        return false;
    }
    std::uint64_t bytes = 0;
    for (const EntryNumber entry : entries) {
        bytes += size_of(entry);
    }
    const Holding held = count_held(entries, bytes);
    unpin(entries);
    state_.sessions.discharge(session, held);
    return true;
}

// Holds all of them, whole and (but to keep them) checked, or none.
Leases::Pin Leases::pin_all(Pinned& pinned) {
    thread_local DistinctEntries seen;
    seen.begin(pinned.wanted.size());
    pinned.entries.reserve(pinned.wanted.size());
    HeldSum held(state_.store.tenants(), &TenantTable::hold);
    for (const Found& found : pinned.wanted) {
        if (!seen.add(found.entry)) {
            continue;
        }
        bool is_first = false;
        if (pin(found, is_first) != Pin::held) {
            held.tell();
            unpin(pinned.entries);
            return Pin::gone;
        }
        pinned.entries.push_back(found.entry);
        const std::uint64_t bytes = size_of(found.entry);
        pinned.bytes += bytes;
        if (is_first) {
            held.add(state_.view.entries[found.entry].tenant.load(kRelaxed), bytes);
        }
    }
    const bool may_hold = held.tell();
    if (pinned.purpose != LeaseFor::keep && check_pinned(pinned.entries, pinned.purpose) != Pin::held) {
        unpin(pinned.entries);
        return Pin::damaged;
    }
    // The server's own upkeep ends by itself.
    if (!may_hold && pinned.purpose != LeaseFor::upkeep) {
        unpin(pinned.entries);
        return Pin::over_quota;
    }
    return Pin::held;
}

// `is_first`: it had no lease before.
Leases::Pin Leases::pin(const Found& wanted, bool& is_first) {
    std::atomic<std::uint64_t>& word = state_.view.entries[wanted.entry].word;
    Spin spin;
    for (std::uint64_t bits = word.load(std::memory_order_acquire);;) {
        const EntryWord now(bits);
        if (now.generation() != wanted.word.generation() || now.leases() == EntryWord::kLeaseMask) {
            return Pin::gone;
        }
        if (now.state() == EntryState::moving) {
            if (!spin.pause()) {
                return Pin::gone;
            }
            bits = word.load(std::memory_order_acquire);
            continue;
        }
        if (!now.is_readable()) {
            return Pin::gone;
        }
        if (word.compare_exchange_weak(bits, now.with_leases(now.leases() + 1).bits(), std::memory_order_acq_rel)) {
            is_first = now.leases() == 0;
            return Pin::held;
        }
    }
}

void Leases::unpin(std::span<const EntryNumber> entries) {
    std::vector<EntryNumber> ended;
    HeldSum held(state_.store.tenants(), &TenantTable::let_go);
    for (const EntryNumber entry : entries) {
        // Read before: it may be another entry as soon as its last lease has ended.
        const TenantNumber tenant = state_.view.entries[entry].tenant.load(kRelaxed);
        const std::uint64_t bytes = size_of(entry);
        const EntryWord before(state_.view.entries[entry].word.fetch_sub(1, std::memory_order_acq_rel));
        assert(before.leases() != 0);
        if (before.leases() == 1) {
            held.add(tenant, bytes);
        }
        if (before.leases() == 1 && before.state() == EntryState::quarantined) {
            ended.push_back(entry);
        }
    }
    held.tell();
    if (!ended.empty()) {
        state_.writer.leave([this, ended = std::move(ended)] {
            for (const EntryNumber entry : ended) {
                state_.store.end_quarantine(entry);
            }
        });
    }
}

// Reads entries that must be checked before they are trusted. A damaged entry loses its name at once if the lease is
// for use, otherwise as soon as the writer's lock is free.
Leases::Pin Leases::check_pinned(std::span<const EntryNumber> entries, LeaseFor purpose) {
    Pin outcome = Pin::held;
    for (const EntryNumber entry : entries) {
        if (!is_suspect(entry)) {
            continue;
        }
        if (!verify_entry(state_, entry)) {
            if (purpose == LeaseFor::use) {
                const std::lock_guard lock(state_.writer);
                remove_damaged(entry);
            } else {
                const std::uint32_t generation = EntryWord(state_.view.entries[entry].word.load(kRelaxed)).generation();
                state_.writer.leave([this, entry, generation] {
                    if (EntryWord(state_.view.entries[entry].word.load(kRelaxed)).generation() == generation) {
                        remove_damaged(entry);
                    }
                });
            }
            outcome = Pin::damaged;
            continue;
        }
        // Leased, so only the lease count can change meanwhile.
        state_.view.entries[entry].word.fetch_and(~EntryWord::kUnverified, std::memory_order_acq_rel);
    }
    return outcome;
}

// The caller holds the writer's lock. A mismatch is counted once, however many threads find it.
void Leases::remove_damaged(EntryNumber entry) {
    counts_.mismatches.fetch_add(state_.store.remove(entry, Leaving::untrusted), kRelaxed);
}

bool Leases::is_suspect(EntryNumber entry) const {
    return verify_ == Verify::always || EntryWord(state_.view.entries[entry].word.load(kRelaxed)).is_unverified();
}

// The bytes of a leased entry's slot.
std::uint64_t Leases::size_of(EntryNumber entry) const {
    const Space space = state_.view.entries[entry].space.load(kRelaxed);
    return state_.namespaces.find(namespace_of(space))->groups[group_of(space)].slot_bytes;
}

Holding Leases::count_held(std::span<const EntryNumber> entries, std::uint64_t bytes) const {
    return {.bytes = bytes, .entries = entries.size(), .nodes = LeaseTable::count_nodes(entries.size())};
}

AcquireOutcome Leases::refuse() {
    counts_.refused.fetch_add(1, kRelaxed);
    return AcquireOutcome::over_limit;
}

AcquireOutcome Leases::lease(SessionId session, const Namespace& name_space, const Pinned& pinned, Shards shards,
                             Acquired& acquired) {
    const Holding held = count_held(pinned.entries, pinned.bytes);
    if (!state_.sessions.charge(session, held)) {
        unpin(pinned.entries);
        return refuse();
    }
    // All work on the entries is done before the lease is listed: from then on a thread that ends the session may give
    // them back.
    describe(name_space, pinned, shards, acquired);
    const bool is_use = pinned.purpose == LeaseFor::use;
    if (pinned.entries.empty()) {
        counts_.hits.fetch_add(is_use ? 1 : 0, kRelaxed);
        return AcquireOutcome::hit;
    }
    if (is_use) {
        const std::uint32_t clock = state_.view.header->clock.fetch_add(1, kRelaxed) + 1;
        for (const EntryNumber entry : pinned.entries) {
            state_.view.entries[entry].recency.store(clock, kRelaxed);
            std::atomic<std::uint16_t>& tiers = state_.view.entries[entry].tiers;
            tiers.store(tiers.load(kRelaxed) | kWasUsed, kRelaxed);
        }
    }
    const Result<LeaseId> lease = state_.lease_lists.open(session, pinned.entries);
    if (!lease.ok()) {
        state_.sessions.discharge(session, held);
        unpin(pinned.entries);
        acquired.groups.clear();
        counts_.refused.fetch_add(1, kRelaxed);
        return AcquireOutcome::no_room;
    }
    acquired.lease = lease.value();
    if (is_use) {
        counts_.hits.fetch_add(1, kRelaxed);
        note_touches(pinned);
    }
    return AcquireOutcome::hit;
}

void Leases::describe(const Namespace& name_space, const Pinned& pinned, Shards shards, Acquired& acquired) const {
    acquired.groups.resize(pinned.ranges.size());
    std::span<const Found> rest = pinned.wanted;
    for (std::size_t group = 0; group < pinned.ranges.size(); ++group) {
        LeasedGroup& leased = acquired.groups[group];
        const std::span<const Found> found = rest.first(pinned.ranges[group].count());
        rest = rest.subspan(found.size());
        leased.first = pinned.ranges[group].first;
        leased.addresses.reserve(found.size());
        for (const Found& one : found) {
            leased.addresses.push_back(state_.store.slot_address(one.entry));
        }
        leased.digests.reserve(found.size() * shards.size());
        for (const std::uint32_t shard : shards) {
            for (const Found& one : found) {
                leased.digests.push_back(digest_of(state_.view, one.entry, shard, name_space));
            }
        }
    }
}

// A policy takes what is touched together for one prefix.
void Leases::note_touches(const Pinned& pinned) {
    const std::span<const EntryNumber> entries = pinned.entries;
    const std::size_t length = pinned.is_request ? entries.size() : 1;
    for (std::size_t begin = 0; begin < entries.size(); begin += length) {
        state_.touches.add(entries.subspan(begin, length));
    }
    if (state_.touches.is_filling() && state_.writer.try_lock()) {
        const std::lock_guard lock(state_.writer, std::adopt_lock);
        state_.drain_touches();
    }
}

}  // namespace kvo
