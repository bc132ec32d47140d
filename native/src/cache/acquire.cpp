// Acquiring and releasing: from any thread, and without the writer's lock unless something is wrong with an entry.
#include <algorithm>
#include <cassert>
#include <cstring>

#include "base/spin.hpp"
#include "cache/cache_core.hpp"
#include "digest/digest.hpp"
#include "index/lookup.hpp"

namespace kvo {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

// An acquire that finds entries gone or damaged between its look and its hold looks again.
constexpr int kLooks = 64;

}  // namespace

Result<Acquired> CacheCore::acquire(SessionId session, const BoundaryQuery& query, std::uint32_t shard) {
    const NamespaceUse name_space = namespaces_.use(query.name_space);
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
        const std::uint64_t boundary = search.find(view_, geometry, query);
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
        acquired.outcome = lease(session, *name_space, pinned, shard, acquired);
        if (acquired.outcome == AcquireOutcome::hit) {
            acquired.boundary = boundary;
        }
        return acquired;
    }
    misses_.fetch_add(1, kRelaxed);
    return acquired;
}

Result<Acquired> CacheCore::acquire_entries(SessionId session, Space space, std::span<const std::uint8_t> hashes,
                                            std::uint32_t shard, LeaseFor purpose) {
    const NamespaceUse name_space = use_space(space);
    if (!name_space || hashes.size() % kHashBytes != 0) {
        return Status(Code::invalid, "no such group, or hashes that have not 32 bytes each");
    }
    std::vector<Found> wanted(hashes.size() / kHashBytes);
    Acquired acquired;
    for (int look = 0; look < kLooks && !wanted.empty(); ++look) {
        find_entries(view_, space, hashes, 1, wanted);
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
        acquired.outcome = lease(session, *name_space, pinned, shard, acquired);
        return acquired;
    }
    misses_.fetch_add(purpose == LeaseFor::use ? 1 : 0, kRelaxed);
    return acquired;
}

Status CacheCore::find_used(Space space, std::span<const std::uint8_t> hashes, std::span<std::uint8_t> found) const {
    if (!use_space(space) || hashes.size() != found.size() * kHashBytes) {
        return {Code::invalid, "no such group, or hashes that have not 32 bytes each"};
    }
    std::vector<Found> entries(found.size());
    find_entries(view_, space, hashes, 1, entries);
    for (std::size_t i = 0; i < found.size(); ++i) {
        const EntryNumber entry = entries[i].entry;
        found[i] = entry != kNoEntry && (view_.entries[entry].tiers.load(kRelaxed) & kWasUsed) != 0 ? 1 : 0;
    }
    return {};
}

Status CacheCore::find_departed(Space space, std::span<const std::uint8_t> hashes,
                                std::span<std::optional<Departed>> found) const {
    if (!use_space(space) || hashes.size() != found.size() * kHashBytes) {
        return {Code::invalid, "no such group, or hashes that have not 32 bytes each"};
    }
    const std::lock_guard lock(writer_);
    for (std::size_t i = 0; i < found.size(); ++i) {
        found[i] = store_.find_departed(space, read_hash(hashes.data() + i * kHashBytes)[0]);
    }
    return {};
}

Status CacheCore::find_stored(Space space, std::span<const std::uint8_t> hashes,
                              std::span<std::optional<std::uint32_t>> found) const {
    if (!use_space(space) || hashes.size() != found.size() * kHashBytes) {
        return {Code::invalid, "no such group, or hashes that have not 32 bytes each"};
    }
    const std::lock_guard lock(writer_);
    for (std::size_t i = 0; i < found.size(); ++i) {
        const EntryNumber entry = find_entry(view_, {read_hash(hashes.data() + i * kHashBytes), space}).entry;
        found[i] = entry == kNoEntry ? std::nullopt : store_.stored_for(entry);
    }
    return {};
}

bool CacheCore::release(SessionId session, LeaseId lease) {
    std::vector<EntryNumber> entries;
    if (!leases_.close(lease, session, entries)) {
        return false;
    }
    std::uint64_t bytes = 0;
    for (const EntryNumber entry : entries) {
        const Space space = view_.entries[entry].space.load(kRelaxed);
        bytes += namespaces_.find(namespace_of(space))->groups[group_of(space)].slot_bytes;
    }
    unpin(entries);
    sessions_.discharge(session, bytes);
    return true;
}

// Holds all of them, whole and checked, or none.
CacheCore::Pin CacheCore::pin_all(std::span<const Found> wanted, std::vector<EntryNumber>& pinned, LeaseFor purpose) {
    pinned.clear();
    pinned.reserve(wanted.size());
    for (const Found& found : wanted) {
        if (pin(found) != Pin::held) {
            unpin(pinned);
            return Pin::gone;
        }
        pinned.push_back(found.entry);
    }
    if (check_pinned(pinned, purpose) != Pin::held) {
        unpin(pinned);
        return Pin::damaged;
    }
    return Pin::held;
}

CacheCore::Pin CacheCore::pin(const Found& wanted) {
    std::atomic<std::uint64_t>& word = view_.entries[wanted.entry].word;
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

void CacheCore::unpin(std::span<const EntryNumber> entries) {
    std::vector<EntryNumber> ended;
    for (const EntryNumber entry : entries) {
        const EntryWord before(view_.entries[entry].word.fetch_sub(1, std::memory_order_acq_rel));
        assert(before.leases() != 0);
        if (before.leases() == 1 && before.state() == EntryState::quarantined) {
            ended.push_back(entry);
        }
    }
    if (!ended.empty()) {
        writer_.leave([this, ended = std::move(ended)] {
            for (const EntryNumber entry : ended) {
                store_.end_quarantine(entry);
            }
        });
    }
}

// Reads what has to be read before it is trusted. A damaged entry loses its name at once; or, where nobody uses it, as
// soon as the writer's lock is to be had.
CacheCore::Pin CacheCore::check_pinned(std::span<const EntryNumber> entries, LeaseFor purpose) {
    Pin outcome = Pin::held;
    for (const EntryNumber entry : entries) {
        if (!is_suspect(entry)) {
            continue;
        }
        if (!verify_entry(entry)) {
            if (purpose == LeaseFor::use) {
                const std::lock_guard lock(writer_);
                remove_damaged(entry);
            } else {
                const std::uint32_t generation = EntryWord(view_.entries[entry].word.load(kRelaxed)).generation();
                writer_.leave([this, entry, generation] {
                    if (EntryWord(view_.entries[entry].word.load(kRelaxed)).generation() == generation) {
                        remove_damaged(entry);
                    }
                });
            }
            outcome = Pin::damaged;
            continue;
        }
        // Leased, so only the lease count can change meanwhile.
        view_.entries[entry].word.fetch_and(~EntryWord::kUnverified, std::memory_order_acq_rel);
    }
    return outcome;
}

// With the writer's lock. Counted once, however many threads find it.
void CacheCore::remove_damaged(EntryNumber entry) {
    mismatches_.fetch_add(store_.remove(entry, Leaving::untrusted), kRelaxed);
}

bool CacheCore::is_suspect(EntryNumber entry) const {
    return options_.verify == Verify::always || EntryWord(view_.entries[entry].word.load(kRelaxed)).is_unverified();
}

bool CacheCore::verify_entry(EntryNumber number) const {
    const Entry& entry = view_.entries[number];
    const Space space = entry.space.load(kRelaxed);
    const Namespace& name_space = *namespaces_.find(namespace_of(space));
    const std::uint64_t record_bytes = name_space.geometry.groups[group_of(space)].record_bytes;
    const std::span<const std::byte> slot = store_.slot_bytes(number);
    std::array<std::uint8_t, kHashBytes> hash;
    for (std::size_t i = 0; i < entry.hash.size(); ++i) {
        const std::uint64_t word = entry.hash[i].load(kRelaxed);
        std::memcpy(hash.data() + i * sizeof(word), &word, sizeof(word));
    }
    for (std::uint32_t shard = 0; shard < name_space.geometry.groups[group_of(space)].shards; ++shard) {
        const auto record = slot.subspan(shard * record_bytes, record_bytes);
        if (digest_bytes(record, space, hash, shard) != digest_of(number, shard, name_space)) {
            return false;
        }
    }
    return true;
}

AcquireOutcome CacheCore::lease(SessionId session, const Namespace& name_space, const Pinned& pinned,
                                std::uint32_t shard, Acquired& acquired) {
    if (!sessions_.charge(session, pinned.bytes)) {
        unpin(pinned.entries);
        refused_.fetch_add(1, kRelaxed);
        return AcquireOutcome::over_limit;
    }
    // Whatever is done with the entries is done before the lease is listed: from then on whoever ends the session may
    // give them back.
    describe(name_space, pinned, shard, acquired);
    const bool is_use = pinned.purpose == LeaseFor::use;
    if (pinned.entries.empty()) {
        hits_.fetch_add(is_use ? 1 : 0, kRelaxed);
        return AcquireOutcome::hit;
    }
    if (is_use) {
        const std::uint32_t clock = view_.header->clock.fetch_add(1, kRelaxed) + 1;
        for (const EntryNumber entry : pinned.entries) {
            view_.entries[entry].recency.store(clock, kRelaxed);
            view_.entries[entry].tiers.store(kInMemory | kWasUsed, kRelaxed);
        }
    }
    const Result<LeaseId> lease = leases_.open(session, pinned.entries);
    if (!lease.ok()) {
        sessions_.discharge(session, pinned.bytes);
        unpin(pinned.entries);
        acquired.groups.clear();
        refused_.fetch_add(1, kRelaxed);
        return AcquireOutcome::no_room;
    }
    acquired.lease = lease.value();
    if (is_use) {
        hits_.fetch_add(1, kRelaxed);
        note_touches(pinned);
    }
    return AcquireOutcome::hit;
}

void CacheCore::describe(const Namespace& name_space, const Pinned& pinned, std::uint32_t shard,
                         Acquired& acquired) const {
    acquired.groups.resize(pinned.ranges.size());
    std::size_t next = 0;
    for (std::size_t group = 0; group < pinned.ranges.size(); ++group) {
        LeasedGroup& leased = acquired.groups[group];
        const std::uint64_t count = pinned.ranges[group].count();
        leased.first = pinned.ranges[group].first;
        leased.addresses.reserve(count);
        leased.digests.reserve(count);
        for (std::uint64_t i = 0; i < count; ++i, ++next) {
            leased.addresses.push_back(store_.slot_address(pinned.entries[next]));
            leased.digests.push_back(digest_of(pinned.entries[next], shard, name_space));
        }
    }
}

// A policy takes what is touched together for one prefix.
void CacheCore::note_touches(const Pinned& pinned) {
    const std::span<const EntryNumber> entries = pinned.entries;
    const std::size_t length = pinned.is_request ? entries.size() : 1;
    for (std::size_t begin = 0; begin < entries.size(); begin += length) {
        if (!touches_.add(entries.subspan(begin, length))) {
            lost_touches_.fetch_add(length, kRelaxed);
        }
    }
    if (touches_.is_filling() && writer_.try_lock()) {
        const std::lock_guard lock(writer_, std::adopt_lock);
        drain_touches();
    }
}

void CacheCore::drain_touches() {
    touches_.drain([this](std::span<const EntryNumber> entries) { store_.touch(entries, known_); },
                   TouchBuffer::kAtOnce);
}

}  // namespace kvo
