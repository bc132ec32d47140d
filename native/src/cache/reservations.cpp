#include "cache/reservations.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/memory_order.hpp"

namespace kvo {

struct Reservations::LeftJob : LeftReservation {
    std::vector<std::uint8_t> hashes;
    Reserving reserving;
};

Status Reservations::begin(Reserving& reserving) const {
    reserving.name_space = state_.use_space(reserving.space);
    const std::size_t hash_bytes = reserving.hashes.size();
    if (!reserving.name_space || (hash_bytes != 0 && hash_bytes != reserving.tickets.size() * kHashBytes)) {
        return {Code::invalid, "no such group, or hashes that are not one for each ticket"};
    }
    return {};
}

// Looks up, without the lock, which blocks of the next part are there.
void Reservations::find_next(Reserving& reserving) const {
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
bool Reservations::reserve_next(Reserving& reserving) {
    const std::uint64_t slot_bytes = reserving.name_space->groups[group_of(reserving.space)].slot_bytes;
    const std::uint16_t place = session_place(reserving.session);
    const auto end = [&](Status status) {
        if (reserving.charged != 0) {
            const std::uint64_t rest = std::exchange(reserving.charged, 0);
            state_.sessions.discharge(reserving.session, {.bytes = rest * slot_bytes, .entries = rest});
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
    std::uint64_t wanted = reserving.end - reserving.next;
    // Before anything is evicted for the others.
    for (std::size_t at = reserving.next; at < reserving.end; ++at) {
        if (const EntryNumber present = reserving.found[at - reserving.begin].entry; present != kNoEntry) {
            state_.store.spare(present);
            --wanted;
        }
    }
    for (; reserving.next < reserving.end; ++reserving.next) {
        Ticket& ticket = reserving.tickets[reserving.next];
        if (reserving.found[reserving.next - reserving.begin].entry != kNoEntry) {
            ticket = 0;
            continue;
        }
        EntryNumber entry = kNoEntry;
        if (reserving.charged == 0) {
            reserving.charged = state_.sessions.charge_some(reserving.session, slot_bytes, wanted);
        }
        if (reserving.charged != 0) {
            entry =
                state_.store.reserve(reserving.space, size_class.value(), reserving.tenant, place, reserving.effort);
            if (entry == kNoEntry && reserving.effort.is_unfinished) {
                // Others have their turn: of what is charged in advance they find the one that is being made.
                const std::uint64_t rest = reserving.charged - 1;
                state_.sessions.discharge(reserving.session, {.bytes = rest * slot_bytes, .entries = rest});
                reserving.charged = 1;
                return false;
            }
        }
        if (entry == kNoEntry) {
            refused_.fetch_add(1, kRelaxed);
            const bool lacks_room = reserving.charged != 0 && !reserving.effort.is_quota_used && !reserving.is_left;
            without_room_.fetch_add(lacks_room ? 1 : 0, kRelaxed);
            return end({});
        }
        --reserving.charged;
        --wanted;
        reserving.effort = {};
        count_by_place_[place].fetch_add(1, kRelaxed);
        ticket = make_ticket(entry, EntryWord(state_.view.entries[entry].word.load(kRelaxed)).generation());
    }
    return reserving.next == reserving.tickets.size();
}

Result<std::size_t> Reservations::reserve(SessionId session, TenantNumber tenant, Space space,
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

std::shared_ptr<const LeftReservation> Reservations::leave_reserve(SessionId session, TenantNumber tenant, Space space,
                                                                   std::vector<std::uint8_t> hashes) {
    const auto job = std::make_shared<LeftJob>();
    job->hashes = std::move(hashes);
    job->tickets.resize(job->hashes.size() / kHashBytes);
    Reserving& reserving = job->reserving;
    reserving.session = session;
    reserving.tenant = tenant;
    reserving.space = space;
    reserving.hashes = job->hashes;
    reserving.tickets = job->tickets;
    reserving.is_left = true;
    job->status = begin(reserving);
    if (!job->status.ok() || job->tickets.empty()) {
        reserving.name_space = {};
        job->is_done.store(true, std::memory_order_release);
        return job;
    }
    state_.writer.leave([this, job] { make_left(job); });
    return job;
}

void Reservations::make_left(const std::shared_ptr<LeftJob>& job) {
    find_next(job->reserving);
    if (!reserve_next(job->reserving)) {
        state_.writer.leave_rest([this, job] { make_left(job); });
        return;
    }
    job->status = job->reserving.status;
    job->tickets.resize(job->reserving.next);
    // It may be looked at when the cache is gone.
    job->reserving.name_space = {};
    job->is_done.store(true, std::memory_order_release);
}

Status Reservations::locate(SessionId session, std::span<const Ticket> tickets,
                            std::span<std::uint64_t> addresses) const {
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

// Returns the slot of a reserved entry. The caller does not hold the lock, so the reservation may end meanwhile: then
// there is no answer, never one of another entry.
std::optional<Slot> Reservations::slot_of(std::uint16_t place, Ticket ticket, Space& space) const {
    if (!is_valid(place, ticket)) {
        return std::nullopt;
    }
    const Entry& entry = state_.view.entries[entry_of(ticket)];
    space = entry.space.load(std::memory_order_acquire);
    const Slot slot = unpack_slot(entry.slot.load(std::memory_order_acquire));
    return is_valid(place, ticket) ? std::optional(slot) : std::nullopt;
}

bool Reservations::is_valid(std::uint16_t place, Ticket ticket) const {
    const EntryNumber entry = entry_of(ticket);
    if (ticket == 0 || entry >= state_.view.header->entry_count.load(std::memory_order_acquire)) {
        return false;
    }
    const EntryWord word(state_.view.entries[entry].word.load(std::memory_order_acquire));
    return word.state() == EntryState::reserved && word.generation() == generation_of(ticket) &&
           Reservation::of(state_.view.entries[entry].recency.load(kRelaxed)).session == place;
}

std::size_t Reservations::abort(SessionId session, std::span<const Ticket> tickets) {
    std::size_t aborted = 0;
    for (std::size_t begin = 0; begin < tickets.size(); begin += CacheState::kPart) {
        const std::lock_guard lock(state_.writer);
        aborted += abort_part(session, tickets.subspan(begin, std::min(CacheState::kPart, tickets.size() - begin)));
    }
    return aborted;
}

std::size_t Reservations::abort_part(SessionId session, std::span<const Ticket> tickets) {
    if (!state_.sessions.is_known(session)) {
        return 0;
    }
    std::size_t aborted = 0;
    for (const Ticket ticket : tickets) {
        if (is_valid(session_place(session), ticket)) {
            end_one(session, entry_of(ticket));
            ++aborted;
        }
    }
    return aborted;
}

void Reservations::leave_abort(SessionId session, const std::vector<Ticket>& tickets) {
    for (std::size_t begin = 0; begin < tickets.size(); begin += CacheState::kPart) {
        const auto part = std::span(tickets).subspan(begin, std::min(CacheState::kPart, tickets.size() - begin));
        state_.writer.leave(
            [this, session, own = std::vector<Ticket>(part.begin(), part.end())] { abort_part(session, own); });
    }
}

void Reservations::end_one(SessionId session, EntryNumber entry) {
    const std::uint64_t bytes = state_.store.slot_bytes(entry).size();
    state_.store.abort(entry);
    note_ends(session, 1, bytes);
}

void Reservations::note_ends(SessionId session, std::uint32_t count, std::uint64_t slot_bytes) {
    if (count != 0) {
        count_by_place_[session_place(session)].fetch_sub(count, kRelaxed);
        state_.sessions.discharge(session, {.bytes = count * slot_bytes, .entries = count});
    }
}

void Reservations::adopt(std::uint16_t place, EntryNumber entry) {
    count_by_place_[place].fetch_add(1);
    const std::uint64_t bytes = state_.store.slot_bytes(entry).size();
    state_.store.tenants().hold(state_.view.entries[entry].tenant.load(kRelaxed), bytes);
    state_.sessions.charge_adopted(place, {.bytes = bytes, .entries = 1});
}

bool Reservations::end_all(SessionId session) {
    const std::uint16_t place = session_place(session);
    if (count_by_place_[place].load(kRelaxed) != 0 && !is_searched_[place].exchange(true)) {
        state_.writer.leave([this, session] { end_from(session, 0); });
    }
    return !is_searched_[place].load();
}

// Goes through a part of the entries, from `begin` on. The caller holds the writer's lock.
void Reservations::end_from(SessionId session, EntryNumber begin) {
    const std::uint16_t place = session_place(session);
    const EntryNumber count = state_.view.header->entry_count.load(std::memory_order_acquire);
    const EntryNumber end = std::min(count, begin + CacheState::kScanPart);
    for (EntryNumber number = begin; number < end; ++number) {
        if (EntryWord(state_.view.entries[number].word.load(kRelaxed)).state() == EntryState::reserved &&
            Reservation::of(state_.view.entries[number].recency.load(kRelaxed)).session == place) {
            end_one(session, number);
        }
    }
    if (end < count && count_by_place_[place].load(kRelaxed) != 0) {
        state_.writer.leave_rest([this, session, end] { end_from(session, end); });
    } else {
        is_searched_[place].store(false);
    }
}

}  // namespace kvo
