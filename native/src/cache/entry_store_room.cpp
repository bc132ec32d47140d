// How an entry store makes room: who goes, and what moves.
#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <functional>
#include <unordered_map>
#include <utility>

#include "base/memory_order.hpp"
#include "cache/entry_store.hpp"

namespace kvo {

bool EntryStore::evict_one(std::optional<TenantNumber> wanting) {
    const std::uint32_t clock = view_.header->clock.load(kRelaxed);
    const auto age = [&](EntryNumber entry) { return clock - view_.entries[entry].recency.load(kRelaxed); };
    const std::size_t policy = tenants_.has_one_policy() ? 0 : tenants_.choose_policy(age, wanting);
    const EntryNumber victim = policy == TenantTable::kNoPolicy ? kNoEntry : tenants_.policy(policy).choose_victim();
    if (victim == kNoEntry) {
        return false;
    }
    if (!try_evict(victim)) {
        return evict_around(age, wanting);
    }
    prefetch_next(tenants_.policy(policy).expect_victim());
    return true;
}

// Memory that is asked for now is there when the next one has to go. The one after that is as a rule its parent.
void EntryStore::prefetch_next(EntryNumber victim) const {
    if (victim == kNoEntry) {
        return;
    }
    table_.prefetch(victim);
    const Entry& entry = view_.entries[victim];
    departures_.prefetch(name_of(entry.space.load(kRelaxed), entry.hash[0].load(kRelaxed)));
    const EntryNumber parent = entry.parent.load(kRelaxed);
    if (parent < view_.header->entry_count.load(kRelaxed)) {
        __builtin_prefetch(&view_.entries[parent], 1);
    }
}

// Evicts a block of full attention together with the blocks of the same name in other such groups, such as those of a
// pipeline's other stages: a block that only one of these groups keeps takes room and is of no use.
bool EntryStore::try_evict(EntryNumber victim) {
    Key key{.hash = hash_of(view_.entries[victim]), .space = view_.entries[victim].space.load(kRelaxed)};
    if (!evict_unused(victim)) {
        return false;
    }
    for (const std::uint32_t group : facts_of(key.space).companions) {
        key.space = make_space(namespace_of(key.space), group);
        if (const EntryNumber other = find_entry(view_, key).entry; other != kNoEntry) {
            evict_unused(other);
        }
    }
    return true;
}

bool EntryStore::evict_unused(EntryNumber entry) {
    const EntryWord now = word(entry);
    assert(now.is_readable());
    if (now.leases() != 0 || !change_word(entry, now, now.next(EntryState::free))) {
        return false;
    }
    unlink(entry, true);
    note_departure(entry, Leaving::evicted);
    give_back(entry);
    return true;
}

// Makes room for this entry in its chain of the table, which is full because names were chosen so. An entry of the
// identity that has most in that chain goes, the least recently used one first: who fills a chain takes the place of
// its own entries, and a neighbour's entry gets in.
bool EntryStore::evict_rival(EntryNumber entry) {
    const auto identity = [&](EntryNumber one) { return namespace_of(view_.entries[one].space.load(kRelaxed)); };
    const auto owner = [&](EntryNumber one) { return view_.entries[one].tenant.load(kRelaxed); };
    std::vector<EntryNumber> rivals = table_.list_rivals(entry);
    std::unordered_map<std::uint32_t, std::size_t> counts;
    for (const EntryNumber rival : rivals) {
        ++counts[identity(rival)];
    }
    const std::uint32_t clock = view_.header->clock.load(kRelaxed);
    std::ranges::stable_sort(rivals, std::greater{}, [&](EntryNumber one) {
        return std::pair(counts[identity(one)], clock - view_.entries[one].recency.load(kRelaxed));
    });
    return std::ranges::any_of(
        rivals, [&](EntryNumber one) { return tenants_.may_take(owner(entry), owner(one)) && try_evict(one); });
}

// Skips candidates that are in use. A policy that keeps returning to the first of them has no others, and another
// policy is asked: entries that one tenant holds must not keep those of other tenants from being evicted.
bool EntryStore::evict_around(const std::function<std::uint32_t(EntryNumber)>& age,
                              std::optional<TenantNumber> wanting) {
    struct Round {
        EntryNumber first = kNoEntry;
        int returns = 0;
        int tries = 0;
    };
    // A policy may pass over an entry that was used, up to three times, before it offers it.
    constexpr int kRounds = 4;
    std::array<Round, TenantTable::kPolicyLimit> rounds;
    std::uint64_t spent = 0;
    for (;;) {
        const std::size_t chosen = tenants_.choose_policy(age, wanting, spent);
        if (chosen == TenantTable::kNoPolicy) {
            return false;
        }
        EvictionPolicy& policy = tenants_.policy(chosen);
        const EntryNumber victim = policy.choose_victim();
        if (try_evict(victim)) {
            return true;
        }
        Round& round = rounds[chosen];
        if ((victim == round.first && ++round.returns == kRounds) || ++round.tries > kVictimTries) {
            spent |= std::uint64_t{1} << chosen;
            continue;
        }
        round.first = round.first == kNoEntry ? victim : round.first;
        policy.keep(victim);
    }
}

std::optional<Slot> EntryStore::make_slot(ClassNumber size_class, EntryNumber owner, TenantNumber tenant,
                                          Effort& effort) {
    effort.is_unfinished = false;
    for (int evicted = 0;; ++evicted) {
        if (const std::optional<Slot> slot = arena_.allocate(size_class, owner)) {
            return slot;
        }
        if (evicted == 0 && is_room_coming()) {
            break;
        }
        if (effort.evicted_bytes != 0 && effort.evicted_bytes > eviction_bound(size_class)) {
            break;
        }
        if (evicted == kEvictedAtOnce) {
            effort.is_unfinished = true;
            break;
        }
        // A plan may leave only more free extents than before; then the next one goes on from there.
        if (arena_.can_make_room(size_class) && make_room(size_class)) {
            continue;
        }
        const std::uint64_t before = counts_.used_bytes.load(kRelaxed);
        if (!evict_one(tenant)) {
            break;
        }
        effort.evicted_bytes += before - counts_.used_bytes.load(kRelaxed);
    }
    return std::nullopt;
}

// Where records in use stand everywhere in between, emptying the whole cache would not make a large slot either. But
// of every size nearly a span of holes may come together before its extents can be given to another.
std::uint64_t EntryStore::eviction_bound(ClassNumber size_class) const {
    std::uint64_t extents = kEvictedSpans * arena_.size_class(size_class).shape.extents;
    for (std::size_t number = 0; number < arena_.class_count(); ++number) {
        extents += arena_.size_class(static_cast<ClassNumber>(number)).shape.extents;
    }
    return view_.header->ready_bytes.load(kRelaxed) / kEvictedShare + extents * view_.header->extent_bytes;
}

bool EntryStore::make_room(ClassNumber size_class) {
    const auto is_movable = [this](EntryNumber owner) {
        const EntryWord now = word(owner);
        return now.is_readable() && now.leases() == 0;
    };
    std::optional<RoomPlan> plan = arena_.plan_room(size_class, is_movable);
    if (!plan) {
        return false;
    }
    bool is_free = true;
    for (const Move& record_move : plan->moves) {
        if (is_free && move(record_move)) {
            arena_.finish_move(record_move);
        } else {
            arena_.cancel_move(record_move);
            is_free = false;
        }
    }
    return is_free;
}

bool EntryStore::vacate(Vacating& vacating) {
    int done = 0;
    while (counts_.used_bytes.load(kRelaxed) > vacating.kept_bytes) {
        if (done++ == kEvictedAtOnce) {
            return true;
        }
        if (!evict_one()) {
            break;  // all else is in use
        }
    }
    std::uint64_t moved_bytes = 0;
    for (auto from = static_cast<ExtentNumber>(vacating.next_extent);; vacating.next_extent = ++from) {
        if (done >= kEvictedAtOnce || moved_bytes >= kVacatedAtOnce) {
            return true;
        }
        const auto span = arena_.find_withdrawn(from);
        if (!span) {
            vacating.next_extent = 0;
            return false;
        }
        const std::uint64_t slot_bytes = arena_.size_class(span->number).slot_bytes;
        for (const auto& [slot, owner] : span->records) {
            const EntryWord now = word(owner);
            if (!now.is_readable() || now.leases() != 0) {
                continue;
            }
            ++done;
            if (vacating.move_bytes >= slot_bytes && move_out(slot, span->number, owner)) {
                vacating.move_bytes -= slot_bytes;
                moved_bytes += slot_bytes;
            } else {
                try_evict(owner);
            }
        }
    }
}

// Into a hole or free extents of the segments that stay.
bool EntryStore::move_out(Slot slot, ClassNumber size_class, EntryNumber owner) {
    const std::optional<Slot> to = arena_.allocate(size_class, owner);
    if (!to) {
        return false;
    }
    const bool has_moved = move({.owner = owner, .from = slot, .to = *to});
    arena_.free(has_moved ? slot : *to);
    return has_moved;
}

bool EntryStore::move(const Move& record_move) {
    const EntryWord now = word(record_move.owner);
    if (!now.is_readable() || now.leases() != 0) {
        return false;
    }
    Entry& entry = view_.entries[record_move.owner];
    const std::span<std::byte> from = slot_bytes(record_move.owner);
    const std::span<std::byte> to = bytes_at(entry.space.load(kRelaxed), record_move.to);
    std::memcpy(to.data(), from.data(), from.size());
    // Both places hold the record now. If this process dies here, either of them is right.
    if (!change_word(record_move.owner, now, now.with_state(EntryState::moving))) {
        return false;
    }
    entry.slot.store(pack_slot(record_move.to), kRelease);
    entry.word.store(now.next(EntryState::readable).with_unverified(now.is_unverified()).bits(), kRelease);
    counts_.moved_bytes.fetch_add(from.size(), kRelaxed);
    return true;
}

}  // namespace kvo
