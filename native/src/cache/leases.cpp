// Acquiring and releasing: from any thread, and without the writer's lock unless something is wrong with an entry.
#include <algorithm>
#include <cassert>
#include <cstring>

#include "base/spin.hpp"
#include "cache/entry_digests.hpp"
#include "cache/leases.hpp"

namespace kvo {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

// An acquire that finds entries gone or damaged between its look and its hold looks again.
constexpr int kLooks = 64;

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
            pinned.bytes += range.count() * name_space->groups[group].slot_bytes;
            for (std::uint64_t position = range.first; position < range.end; ++position) {
                wanted.push_back(search.found(group, position));
            }
        }
        if (pin_all(wanted, pinned.entries, LeaseFor::use) != Pin::held) {
            continue;
        }
        acquired.outcome = lease(session, *name_space, pinned, shards, acquired);
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
        const Pin pin = pin_all(wanted, pinned.entries, purpose);
        if (pin == Pin::damaged && purpose == LeaseFor::upkeep) {
            break;  // it may have its name a while longer
        }
        if (pin != Pin::held) {
            continue;
        }
        pinned.ranges.resize(name_space->groups.size());
        pinned.ranges[group_of(space)] = {0, wanted.size()};
        pinned.bytes = wanted.size() * name_space->groups[group_of(space)].slot_bytes;
        acquired.outcome = lease(session, *name_space, pinned, shards, acquired);
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
        const Space space = state_.view.entries[entry].space.load(kRelaxed);
        bytes += state_.namespaces.find(namespace_of(space))->groups[group_of(space)].slot_bytes;
    }
    unpin(entries);
    state_.sessions.discharge(session, bytes);
    return true;
}

// Holds all of them, whole and (but to keep them) checked, or none.
Leases::Pin Leases::pin_all(std::span<const Found> wanted, std::vector<EntryNumber>& pinned, LeaseFor purpose) {
    pinned.clear();
    pinned.reserve(wanted.size());
    for (const Found& found : wanted) {
        if (pin(found) != Pin::held) {
            unpin(pinned);
            return Pin::gone;
        }
        pinned.push_back(found.entry);
    }
    if (purpose != LeaseFor::keep && check_pinned(pinned, purpose) != Pin::held) {
        unpin(pinned);
        return Pin::damaged;
    }
    return Pin::held;
}

Leases::Pin Leases::pin(const Found& wanted) {
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
            return Pin::held;
        }
    }
}

void Leases::unpin(std::span<const EntryNumber> entries) {
    std::vector<EntryNumber> ended;
    for (const EntryNumber entry : entries) {
        const EntryWord before(state_.view.entries[entry].word.fetch_sub(1, std::memory_order_acq_rel));
        assert(before.leases() != 0);
        if (before.leases() == 1 && before.state() == EntryState::quarantined) {
            ended.push_back(entry);
        }
    }
    if (!ended.empty()) {
        state_.writer.leave([this, ended = std::move(ended)] {
            for (const EntryNumber entry : ended) {
                state_.store.end_quarantine(entry);
            }
        });
    }
}

// Reads what has to be read before it is trusted. A damaged entry loses its name at once; or, where nobody uses it, as
// soon as the writer's lock is to be had.
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

// With the writer's lock. Counted once, however many threads find it.
void Leases::remove_damaged(EntryNumber entry) {
    counts_.mismatches.fetch_add(state_.store.remove(entry, Leaving::untrusted), kRelaxed);
}

bool Leases::is_suspect(EntryNumber entry) const {
    return verify_ == Verify::always || EntryWord(state_.view.entries[entry].word.load(kRelaxed)).is_unverified();
}

AcquireOutcome Leases::lease(SessionId session, const Namespace& name_space, const Pinned& pinned, Shards shards,
                             Acquired& acquired) {
    if (!state_.sessions.charge(session, pinned.bytes)) {
        unpin(pinned.entries);
        counts_.refused.fetch_add(1, kRelaxed);
        return AcquireOutcome::over_limit;
    }
    // Whatever is done with the entries is done before the lease is listed: from then on whoever ends the session may
    // give them back.
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
        state_.sessions.discharge(session, pinned.bytes);
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
    std::span<const EntryNumber> rest = pinned.entries;
    for (std::size_t group = 0; group < pinned.ranges.size(); ++group) {
        LeasedGroup& leased = acquired.groups[group];
        const std::span<const EntryNumber> entries = rest.first(pinned.ranges[group].count());
        rest = rest.subspan(entries.size());
        leased.first = pinned.ranges[group].first;
        leased.addresses.reserve(entries.size());
        for (const EntryNumber entry : entries) {
            leased.addresses.push_back(state_.store.slot_address(entry));
        }
        leased.digests.reserve(entries.size() * shards.size());
        for (const std::uint32_t shard : shards) {
            for (const EntryNumber entry : entries) {
                leased.digests.push_back(digest_of(state_.view, entry, shard, name_space));
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
