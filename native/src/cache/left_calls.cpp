// Calls of a thread that serves all domains: what has to be done under the writer's lock of one of them is left there.
#include <algorithm>
#include <utility>

#include "cache/cache_core.hpp"
#include "index/lookup.hpp"

namespace kvo {

struct CacheCore::ReserveJob : LeftReservation {
    std::vector<std::uint8_t> hashes;
    Reserving reserving;
};

struct CacheCore::CommitJob : LeftCommit {
    OwnedBatch owned;
    Committing committing;
};

std::shared_ptr<const LeftReservation> CacheCore::leave_reserve(SessionId session, TenantNumber tenant, Space space,
                                                                std::vector<std::uint8_t> hashes) {
    const auto job = std::make_shared<ReserveJob>();
    job->hashes = std::move(hashes);
    job->tickets.resize(job->hashes.size() / kHashBytes);
    Reserving& reserving = job->reserving;
    reserving.session = session;
    reserving.tenant = tenant;
    reserving.space = space;
    reserving.hashes = job->hashes;
    reserving.tickets = job->tickets;
    job->status = begin(reserving);
    if (!job->status.ok() || job->tickets.empty()) {
        reserving.name_space = {};
        job->is_done.store(true, std::memory_order_release);
        return job;
    }
    state_.writer.leave([this, job] { make_left(job); });
    return job;
}

void CacheCore::make_left(const std::shared_ptr<ReserveJob>& job) {
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

std::shared_ptr<const LeftCommit> CacheCore::leave_commit(SessionId session, OwnedBatch owned) {
    const auto job = std::make_shared<CommitJob>();
    job->owned = std::move(owned);
    job->outcomes.resize(job->owned.tickets.size());
    job->committing = {.session = session,
                       .batch = {.space = job->owned.space,
                                 .shard = job->owned.shard,
                                 .tickets = job->owned.tickets,
                                 .hashes = job->owned.hashes,
                                 .parents = job->owned.parents,
                                 .digests = job->owned.digests},
                       .outcomes = job->outcomes};
    job->status = job->owned.digests.size() == job->owned.tickets.size()
                      ? begin(job->committing)
                      : Status(Code::invalid, "there is not one digest for each ticket");
    if (!job->status.ok() || job->outcomes.empty()) {
        job->committing.name_space = {};
        job->is_done.store(true, std::memory_order_release);
        return job;
    }
    state_.writer.leave([this, job] { make_left(job); });
    return job;
}

void CacheCore::make_left(const std::shared_ptr<CommitJob>& job) {
    Committing& committing = job->committing;
    const auto rest = std::span<const std::uint64_t>(job->owned.digests).subspan(committing.next);
    if (!commit_next(committing, rest.first(std::min(rest.size(), CacheState::kPart)))) {
        state_.writer.leave_rest([this, job] { make_left(job); });
        return;
    }
    job->status = committing.status;
    committing.name_space = {};
    job->is_done.store(true, std::memory_order_release);
}

void CacheCore::leave_abort(SessionId session, const std::vector<Ticket>& tickets) {
    for (std::size_t begin = 0; begin < tickets.size(); begin += CacheState::kPart) {
        const auto part = std::span(tickets).subspan(begin, std::min(CacheState::kPart, tickets.size() - begin));
        state_.writer.leave(
            [this, session, own = std::vector<Ticket>(part.begin(), part.end())] { abort_part(session, own); });
    }
}

void CacheCore::leave_invalidate(Space space, std::span<const std::uint8_t> hashes) {
    for (std::size_t begin = 0; begin < hashes.size(); begin += CacheState::kPart * kHashBytes) {
        const auto part = hashes.subspan(begin, std::min(CacheState::kPart * kHashBytes, hashes.size() - begin));
        state_.writer.leave(
            [this, space, own = std::vector<std::uint8_t>(part.begin(), part.end())] { invalidate_part(space, own); });
    }
}

bool CacheCore::leave_evict(std::span<const std::uint32_t> name_spaces) {
    if (is_evicting_.exchange(true)) {
        return false;
    }
    auto wanted = std::make_shared<std::vector<std::uint32_t>>(kNamespaceLimit, kNamespaceNumbers);  // nobody's
    for (const std::uint32_t number : name_spaces) {
        (*wanted)[place_of_namespace(number)] = number;
    }
    state_.writer.leave([this, wanted = std::move(wanted)] { evict_all(wanted, 0); });
    return !is_evicting_.load();
}

// With the writer's lock: of the entries from this one on.
void CacheCore::evict_all(const std::shared_ptr<const std::vector<std::uint32_t>>& by_place, EntryNumber begin) {
    const EntryNumber count = state_.view.header->entry_count.load(std::memory_order_acquire);
    const EntryNumber end = std::min(count, begin + CacheState::kScanPart);
    for (EntryNumber number = begin; number < end; ++number) {
        const Entry& entry = state_.view.entries[number];
        const std::uint32_t name_space = namespace_of(entry.space.load(std::memory_order_relaxed));
        if (EntryWord(entry.word.load(std::memory_order_relaxed)).is_readable() &&
            (*by_place)[place_of_namespace(name_space)] == name_space) {
            state_.store.remove(number, Leaving::evicted);
        }
    }
    if (end < count) {
        state_.writer.leave_rest([this, by_place, end] { evict_all(by_place, end); });
    } else {
        is_evicting_.store(false);
    }
}

std::unique_lock<WriterLock> CacheCore::hold_writer() { return std::unique_lock(state_.writer); }

}  // namespace kvo
