// Reserving, committing, aborting, and everything else that changes which entries there are: under the writer's lock,
// in parts short enough for others to get in between.
#include <algorithm>
#include <array>

#include "cache/cache_core.hpp"
#include "cache/entry_digests.hpp"
#include "index/lookup.hpp"

namespace kvo {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kRelease = std::memory_order_release;
constexpr std::size_t kAhead = 8;  // items whose memory is asked for meanwhile

bool is_zero(const HashWords& words) { return (words[0] | words[1] | words[2] | words[3]) == 0; }

}  // namespace

Status CacheCore::begin(Reserving& reserving) const {
    reserving.name_space = state_.use_space(reserving.space);
    const std::size_t hash_bytes = reserving.hashes.size();
    if (!reserving.name_space || (hash_bytes != 0 && hash_bytes != reserving.tickets.size() * kHashBytes)) {
        return {Code::invalid, "no such group, or hashes that are not one for each ticket"};
    }
    return {};
}

// Which of the next part are there needs no lock.
void CacheCore::find_next(Reserving& reserving) const {
    if (reserving.next != reserving.end) {
        return;
    }
    reserving.begin = reserving.end;
    reserving.end = std::min(reserving.begin + CacheState::kPart, reserving.tickets.size());
    const std::size_t count = reserving.end - reserving.begin;
    if (!reserving.hashes.empty()) {
        std::ranges::fill(reserving.found, Found{});
        find_entries(state_.view, reserving.space, reserving.hashes.subspan(reserving.begin * kHashBytes), 1,
                     std::span(reserving.found).first(count));
    }
}

// With the writer's lock: a part, or less where very much has to go for one slot. True: all is decided.
bool CacheCore::reserve_next(Reserving& reserving) {
    const std::uint64_t slot_bytes = reserving.name_space->groups[group_of(reserving.space)].slot_bytes;
    const std::uint16_t place = session_place(reserving.session);
    const auto end = [&](Status status) {
        if (reserving.is_charged) {
            state_.sessions.discharge(reserving.session, slot_bytes);
        }
        reserving.status = std::move(status);
        return true;
    };
    if (!state_.store.tenants().is_known(reserving.tenant)) {
        return end({Code::invalid, "no tenant has number " + std::to_string(reserving.tenant)});
    }
    // Its number may be another size's since the last time.
    const auto size_class = state_.store.open_class(reserving.space);
    if (!size_class.ok()) {
        return end(size_class.fault());
    }
    state_.drain_touches();
    for (; reserving.next < reserving.end; ++reserving.next) {
        Ticket& ticket = reserving.tickets[reserving.next];
        if (reserving.found[reserving.next - reserving.begin].entry != kNoEntry) {
            ticket = 0;
            continue;
        }
        EntryNumber entry = kNoEntry;
        if (reserving.is_charged || state_.sessions.charge(reserving.session, slot_bytes)) {
            reserving.is_charged = true;
            entry =
                state_.store.reserve(reserving.space, size_class.value(), reserving.tenant, place, reserving.effort);
            if (entry == kNoEntry && reserving.effort.is_unfinished) {
                return false;
            }
        }
        if (entry == kNoEntry) {
            refused_.fetch_add(1, kRelaxed);
            return end({});
        }
        reserving.is_charged = false;
        reserving.effort = {};
        reserved_by_place_[place].fetch_add(1, kRelaxed);
        ticket = make_ticket(entry, EntryWord(state_.view.entries[entry].word.load(kRelaxed)).generation());
    }
    return reserving.next == reserving.tickets.size();
}

Result<std::size_t> CacheCore::reserve(SessionId session, TenantNumber tenant, Space space,
                                       std::span<const std::uint8_t> hashes, std::span<Ticket> tickets) {
    Reserving reserving{.session = session, .tenant = tenant, .space = space, .hashes = hashes, .tickets = tickets};
    if (Status status = begin(reserving); !status.ok()) {
        return status;
    }
    for (bool is_over = tickets.empty(); !is_over;) {
        find_next(reserving);
        const std::lock_guard lock(state_.writer);
        is_over = reserve_next(reserving);
    }
    if (!reserving.status.ok()) {
        return reserving.status;
    }
    return reserving.next;
}

Status CacheCore::locate(SessionId session, std::span<const Ticket> tickets, std::span<std::uint64_t> addresses) const {
    if (addresses.size() != tickets.size()) {
        return {Code::invalid, "there is not one address for each ticket"};
    }
    const bool is_known = state_.sessions.is_known(session);
    NamespaceUse name_space;
    for (std::size_t i = 0; i < tickets.size(); ++i) {
        if (tickets[i] == 0) {
            addresses[i] = kNoAddress;
            continue;
        }
        Space space = 0;
        const auto slot = is_known ? slot_of(session_place(session), tickets[i], space) : std::nullopt;
        if (slot && (!name_space || name_space->number != namespace_of(space))) {
            name_space = state_.namespaces.use(namespace_of(space));  // the reservation may end meanwhile
        }
        if (!slot || !name_space) {
            return {Code::invalid, "ticket " + std::to_string(tickets[i]) + " is not one of this session"};
        }
        addresses[i] = state_.store.address_of(space, *slot);
    }
    return {};
}

Status CacheCore::begin(Committing& committing) const {
    const CommitBatch& batch = committing.batch;
    committing.name_space = state_.use_space(batch.space);
    const std::size_t count = batch.tickets.size();
    if (!committing.name_space || batch.hashes.size() != count * kHashBytes || committing.outcomes.size() != count ||
        (!batch.parents.empty() && batch.parents.size() != count * kHashBytes) ||
        (!batch.digests.empty() && batch.digests.size() != count)) {
        return {Code::invalid, "no such group, or not one hash, parent and digest for each ticket"};
    }
    if (batch.shard >= committing.name_space->geometry.groups[group_of(batch.space)].shards) {
        return {Code::invalid, "the group has no shard " + std::to_string(batch.shard)};
    }
    if (std::ranges::find(batch.digests, kNoDigest) != batch.digests.end()) {
        return {Code::invalid, "0 is no record's digest"};
    }
    committing.is_open = state_.sessions.is_open(committing.session);
    return {};
}

// With the writer's lock: items [begin, end). True: these were the last, or none can be.
bool CacheCore::commit_next(Committing& committing, std::span<const std::uint64_t> digests) {
    const CommitBatch& batch = committing.batch;
    const std::uint16_t place = session_place(committing.session);
    const std::size_t begin = committing.next;
    const std::size_t end = begin + digests.size();
    if (batch.tenant && !state_.store.tenants().is_known(*batch.tenant)) {
        committing.status = {Code::invalid, "no tenant has number " + std::to_string(*batch.tenant)};
        return true;
    }
    for (std::size_t i = begin; i < end; ++i) {
        CommitOutcome& outcome = committing.outcomes[i];
        const bool is_valid = committing.is_open && is_reserved_by(place, batch.tickets[i]) &&
                              state_.view.entries[entry_of(batch.tickets[i])].space.load(kRelaxed) == batch.space;
        if (is_valid && i + kAhead < end) {
            state_.store.expect(entry_of(batch.tickets[i]),
                                read_hash(batch.hashes.data() + (i + kAhead) * kHashBytes)[0]);
        }
        outcome = is_valid ? commit_one(batch, i, digests[i - begin], *committing.name_space) : CommitOutcome::stale;
        if (outcome != CommitOutcome::stale && outcome != CommitOutcome::incomplete) {
            reserved_by_place_[place].fetch_sub(1, kRelaxed);
            state_.sessions.discharge(committing.session,
                                      committing.name_space->groups[group_of(batch.space)].slot_bytes);
        }
    }
    committing.next = end;
    return end == batch.tickets.size();
}

Status CacheCore::commit(SessionId session, const CommitBatch& batch, std::span<CommitOutcome> outcomes) {
    Committing committing{.session = session, .batch = batch, .outcomes = outcomes};
    if (Status status = begin(committing); !status.ok()) {
        return status;
    }
    const std::uint16_t place = session_place(session);
    std::array<std::uint64_t, CacheState::kPart> digests;
    for (bool is_over = batch.tickets.empty(); !is_over;) {
        const std::size_t first = committing.next;
        const std::size_t end = std::min(batch.tickets.size(), first + CacheState::kPart);
        for (std::size_t i = first; i < end; ++i) {
            digests[i - first] = batch.digests.empty() ? digest_item(place, batch, i) : batch.digests[i];
        }
        prefetch_buckets(state_.view, batch.space,
                         batch.hashes.subspan(first * kHashBytes, (end - first) * kHashBytes));
        const std::lock_guard lock(state_.writer);
        is_over = commit_next(committing, std::span(digests).first(end - first));
    }
    return committing.status;
}

// Of a reserved entry. Without the lock, so the reservation may end meanwhile: then there is no answer, never one of
// another entry.
std::optional<Slot> CacheCore::slot_of(std::uint16_t place, Ticket ticket, Space& space) const {
    if (!is_reserved_by(place, ticket)) {
        return std::nullopt;
    }
    const Entry& entry = state_.view.entries[entry_of(ticket)];
    space = entry.space.load(std::memory_order_acquire);
    const Slot slot = unpack_slot(entry.slot.load(std::memory_order_acquire));
    return is_reserved_by(place, ticket) ? std::optional(slot) : std::nullopt;
}

// The reservation is this session's, so nobody writes to the slot while it is read.
std::uint64_t CacheCore::digest_item(std::uint16_t place, const CommitBatch& batch, std::size_t item) const {
    Space space = 0;
    const std::optional<Slot> slot = slot_of(place, batch.tickets[item], space);
    if (!slot || space != batch.space) {
        return kNoDigest;
    }
    const Namespace& name_space = *state_.namespaces.find(namespace_of(batch.space));
    const std::uint64_t record_bytes = name_space.geometry.groups[group_of(batch.space)].record_bytes;
    const auto record = state_.store.bytes_at(space, *slot).subspan(batch.shard * record_bytes, record_bytes);
    return make_digest(name_space, batch.space, batch.hashes.subspan(item * kHashBytes).first<kHashBytes>(),
                       batch.shard, record);
}

CommitOutcome CacheCore::commit_one(const CommitBatch& batch, std::size_t item, std::uint64_t digest,
                                    const Namespace& name_space) {
    const EntryNumber number = entry_of(batch.tickets[item]);
    Entry& entry = state_.view.entries[number];
    const HashWords hash = read_hash(batch.hashes.data() + item * kHashBytes);
    const Reservation reservation = Reservation::of(entry.recency.load(kRelaxed));
    const auto committed = static_cast<std::uint16_t>(reservation.committed | (1u << batch.shard));
    for (std::size_t i = 0; i < hash.size(); ++i) {
        if (reservation.committed == 0) {
            entry.hash[i].store(hash[i], kRelease);
        } else if (entry.hash[i].load(kRelaxed) != hash[i]) {
            return CommitOutcome::stale;
        }
    }
    set_digest(state_.view, number, batch.shard, name_space, digest);
    const std::uint32_t complete = (1u << name_space.geometry.groups[group_of(batch.space)].shards) - 1;
    entry.recency.store(Reservation{reservation.session, committed}.bits(), kRelease);
    if (committed != complete) {
        return CommitOutcome::incomplete;
    }
    const Key key{hash, batch.space};
    if (find_entry(state_.view, key).entry != kNoEntry) {
        state_.store.abort(number);
        duplicates_.fetch_add(1, kRelaxed);
        return CommitOutcome::duplicate;
    }
    if (batch.tenant) {
        state_.store.charge(number, *batch.tenant);
    }
    if (!state_.store.publish(number, hash, find_parent(batch, item, name_space)).ok()) {
        state_.store.abort(number);
        return CommitOutcome::refused;
    }
    return CommitOutcome::readable;
}

EntryNumber CacheCore::find_parent(const CommitBatch& batch, std::size_t item, const Namespace& name_space) const {
    if (batch.parents.empty()) {
        return kNoEntry;
    }
    const HashWords parent = read_hash(batch.parents.data() + item * kHashBytes);
    if (is_zero(parent)) {
        return kNoEntry;
    }
    const std::uint32_t group = name_space.groups[group_of(batch.space)].anchor;
    return find_entry(state_.view, {parent, make_space(name_space.number, group)}).entry;
}

std::size_t CacheCore::abort(SessionId session, std::span<const Ticket> tickets) {
    std::size_t aborted = 0;
    for (std::size_t begin = 0; begin < tickets.size(); begin += CacheState::kPart) {
        const std::lock_guard lock(state_.writer);
        aborted += abort_part(session, tickets.subspan(begin, std::min(CacheState::kPart, tickets.size() - begin)));
    }
    return aborted;
}

std::size_t CacheCore::abort_part(SessionId session, std::span<const Ticket> tickets) {
    if (!state_.sessions.is_known(session)) {
        return 0;
    }
    std::size_t aborted = 0;
    for (const Ticket ticket : tickets) {
        if (is_reserved_by(session_place(session), ticket)) {
            end_reservation(session, entry_of(ticket));
            ++aborted;
        }
    }
    return aborted;
}

void CacheCore::end_reservation(SessionId session, EntryNumber entry) {
    const std::uint64_t bytes = state_.store.slot_bytes(entry).size();
    state_.store.abort(entry);
    reserved_by_place_[session_place(session)].fetch_sub(1, kRelaxed);
    state_.sessions.discharge(session, bytes);
}

bool CacheCore::is_reserved_by(std::uint16_t place, Ticket ticket) const {
    const EntryNumber entry = entry_of(ticket);
    if (ticket == 0 || entry >= state_.view.header->entry_count.load(std::memory_order_acquire)) {
        return false;
    }
    const EntryWord word(state_.view.entries[entry].word.load(std::memory_order_acquire));
    return word.state() == EntryState::reserved && word.generation() == generation_of(ticket) &&
           Reservation::of(state_.view.entries[entry].recency.load(kRelaxed)).session == place;
}

std::size_t CacheCore::invalidate(Space space, std::span<const std::uint8_t> hashes) {
    std::size_t removed = 0;
    const std::size_t count = hashes.size() / kHashBytes;
    for (std::size_t begin = 0; begin < count; begin += CacheState::kPart) {
        const std::lock_guard lock(state_.writer);
        removed += invalidate_part(
            space, hashes.subspan(begin * kHashBytes, std::min(CacheState::kPart, count - begin) * kHashBytes));
    }
    return removed;
}

std::size_t CacheCore::invalidate_part(Space space, std::span<const std::uint8_t> hashes) {
    std::size_t removed = 0;
    for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
        const EntryNumber entry = find_entry(state_.view, {read_hash(hashes.data() + at), space}).entry;
        removed += entry != kNoEntry && state_.store.remove(entry, Leaving::untrusted);
    }
    return removed;
}

std::uint64_t CacheCore::evict(std::uint64_t bytes) {
    const auto used = [this] { return state_.store.counts().used_bytes.load(kRelaxed); };
    bytes = std::min(bytes, memory_->capacity_bytes());
    std::uint64_t evicted = 0;
    for (bool is_more = true; is_more && evicted < bytes;) {
        const std::lock_guard lock(state_.writer);
        state_.drain_touches();
        const std::uint64_t before = used();
        for (std::size_t i = 0; i < CacheState::kPart && is_more && evicted + before - used() < bytes; ++i) {
            is_more = state_.store.evict_one();
        }
        evicted += before - used();
    }
    return evicted;
}

std::size_t CacheCore::clear(std::uint32_t name_space) {
    std::size_t removed = 0;
    const EntryNumber count = state_.view.header->entry_count.load(std::memory_order_acquire);
    for (EntryNumber begin = 0; begin < count; begin += CacheState::kScanPart) {
        const std::lock_guard lock(state_.writer);
        for (EntryNumber number = begin; number < std::min(count, begin + CacheState::kScanPart); ++number) {
            const Entry& entry = state_.view.entries[number];
            const bool is_it = EntryWord(entry.word.load(kRelaxed)).is_readable() &&
                               namespace_of(entry.space.load(kRelaxed)) == name_space;
            removed += is_it && state_.store.remove(number, Leaving::cleared);
        }
    }
    return removed;
}

std::size_t CacheCore::reclaim_ended() {
    // One thread at a time: when a place is free again, nobody may still look for what its last session left.
    const std::unique_lock lock(reclaiming_, std::try_to_lock);
    if (!lock) {
        return 0;
    }
    // What was left when nobody had the lock any more to see it is done now.
    state_.writer.leave([] {});
    std::size_t reclaimed = 0;
    for (const SessionId session : state_.sessions.take_ended()) {
        reclaimed += reclaim(session);
    }
    return reclaimed;
}

// False: a call that began before the session ended goes on somewhere, or who has the writer's lock goes on with this
// one; it is gone the next time.
bool CacheCore::reclaim(SessionId session) {
    for (const LeaseId lease : state_.lease_lists.list(session)) {
        leases_.release(session, lease);
    }
    const std::uint16_t place = session_place(session);
    if (reserved_by_place_[place].load(kRelaxed) != 0 && !is_searched_[place].exchange(true)) {
        state_.writer.leave([this, session] { end_reservations(session, 0); });
    }
    return !is_searched_[place].load() && state_.sessions.forget(session);
}

// With the writer's lock: of the entries from this one on.
void CacheCore::end_reservations(SessionId session, EntryNumber begin) {
    const std::uint16_t place = session_place(session);
    const EntryNumber count = state_.view.header->entry_count.load(std::memory_order_acquire);
    const EntryNumber end = std::min(count, begin + CacheState::kScanPart);
    for (EntryNumber number = begin; number < end; ++number) {
        if (EntryWord(state_.view.entries[number].word.load(kRelaxed)).state() == EntryState::reserved &&
            Reservation::of(state_.view.entries[number].recency.load(kRelaxed)).session == place) {
            end_reservation(session, number);
        }
    }
    if (end < count && reserved_by_place_[place].load(kRelaxed) != 0) {
        state_.writer.leave_rest([this, session, end] { end_reservations(session, end); });
    } else {
        is_searched_[place].store(false);
    }
}

CacheStats CacheCore::stats() const {
    CacheStats stats;
    const StoreCounts& counts = state_.store.counts();
    const LeaseCounts& leases = leases_.counts();
    stats.capacity_bytes = memory_->capacity_bytes();
    stats.ready_bytes = memory_->ready_bytes();
    stats.used_bytes = counts.used_bytes.load(kRelaxed);
    stats.readable = counts.readable.load(kRelaxed);
    stats.reserved = counts.reserved.load(kRelaxed);
    stats.quarantined = counts.quarantined.load(kRelaxed);
    stats.evicted = counts.evicted.load(kRelaxed);
    stats.evicted_unused = counts.evicted_unused.load(kRelaxed);
    for (const std::atomic<std::uint64_t>& bucket : counts.residence) {
        stats.residence.push_back(bucket.load(kRelaxed));
    }
    stats.residence_seconds = counts.residence_seconds.load(kRelaxed);
    for (const std::uint32_t number : state_.namespaces.list()) {
        if (const std::uint64_t bytes = counts.used_by[place_of_namespace(number)].load(kRelaxed); bytes != 0) {
            stats.used_by.emplace_back(number, bytes);
        }
    }
    stats.moved_bytes = counts.moved_bytes.load(kRelaxed);
    stats.leases = state_.lease_lists.count();
    stats.sessions = state_.sessions.count();
    stats.namespaces = state_.namespaces.known();
    stats.hits = leases.hits.load(kRelaxed);
    stats.misses = leases.misses.load(kRelaxed);
    stats.refused = leases.refused.load(kRelaxed) + refused_.load(kRelaxed);
    stats.duplicates = duplicates_.load(kRelaxed);
    stats.mismatches = leases.mismatches.load(kRelaxed);
    stats.lost_touches = state_.touches.lost();
    stats.index_bytes = memory_->index().segment().held_bytes();
    stats.tenants = state_.store.tenants().usage();
    return stats;
}

}  // namespace kvo
