#include "cache/commits.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/memory_order.hpp"
#include "cache/cache_state.hpp"

namespace kvo {
namespace {

constexpr std::size_t kAhead = 8;  // items whose memory is asked for meanwhile; see PrefixPolicy::expect_admission

bool is_zero(const HashWords& words) { return (words[0] | words[1] | words[2] | words[3]) == 0; }

}  // namespace

struct Commits::LeftJob : LeftCommit {
    OwnedBatch owned;
    Committing committing;
};

Status Commits::begin(Committing& committing) const {
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
bool Commits::commit_next(Committing& committing, std::span<const std::uint64_t> digests) {
    const CommitBatch& batch = committing.batch;
    const std::uint16_t place = session_place(committing.session);
    const std::size_t begin = committing.next;
    const std::size_t end = begin + digests.size();
    if (batch.tenant && !state_.store.tenants().is_known(*batch.tenant)) {
        committing.status = {Code::invalid, "no tenant has number " + std::to_string(*batch.tenant)};
        return true;
    }
    EntryNumber before = kNoEntry;  // readable since the item before
    std::uint32_t ended = 0;
    for (std::size_t i = begin; i < end; ++i) {
        CommitOutcome& outcome = committing.outcomes[i];
        const bool is_valid = committing.is_open && reservations_.is_valid(place, batch.tickets[i]) &&
                              state_.view.entries[entry_of(batch.tickets[i])].space.load(kRelaxed) == batch.space;
        if (is_valid && i + kAhead < end) {
            state_.store.expect(entry_of(batch.tickets[i]),
                                read_hash(batch.hashes.data() + (i + kAhead) * kHashBytes)[0]);
        }
        outcome =
            is_valid ? commit_one(batch, i, digests[i - begin], *committing.name_space, before) : CommitOutcome::stale;
        before = outcome == CommitOutcome::readable ? entry_of(batch.tickets[i]) : kNoEntry;
        ended += outcome != CommitOutcome::stale && outcome != CommitOutcome::incomplete ? 1 : 0;
    }
    reservations_.note_ends(committing.session, ended, committing.name_space->groups[group_of(batch.space)].slot_bytes);
    committing.next = end;
    return end == batch.tickets.size();
}

Status Commits::commit(SessionId session, const CommitBatch& batch, std::span<CommitOutcome> outcomes) {
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

std::shared_ptr<const LeftCommit> Commits::leave_commit(SessionId session, OwnedBatch owned) {
    const auto job = std::make_shared<LeftJob>();
    job->owned = std::move(owned);
    job->outcomes.resize(job->owned.tickets.size());
    job->committing = {.session = session,
                       .batch = {.space = job->owned.space,
                                 .shard = job->owned.shard,
                                 .tickets = job->owned.tickets,
                                 .hashes = job->owned.hashes,
                                 .parents = job->owned.parents,
                                 .digests = job->owned.digests,
                                 .was_promoted = job->owned.was_promoted},
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

void Commits::make_left(const std::shared_ptr<LeftJob>& job) {
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

// The reservation is this session's, so no other session writes to the slot while it is read.
std::uint64_t Commits::digest_item(std::uint16_t place, const CommitBatch& batch, std::size_t item) const {
    Space space = 0;
    const std::optional<Slot> slot = reservations_.slot_of(place, batch.tickets[item], space);
    if (!slot || space != batch.space) {
        return kNoDigest;
    }
    const Namespace& name_space = *state_.namespaces.find(namespace_of(batch.space));
    const std::uint64_t record_bytes = name_space.geometry.groups[group_of(batch.space)].record_bytes;
    const auto record = state_.store.bytes_at(space, *slot).subspan(batch.shard * record_bytes, record_bytes);
    return make_digest(name_space, batch.space, batch.hashes.subspan(item * kHashBytes).first<kHashBytes>(),
                       batch.shard, record);
}

CommitOutcome Commits::commit_one(const CommitBatch& batch, std::size_t item, std::uint64_t digest,
                                  const Namespace& name_space, EntryNumber before) {
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
    const EntryNumber parent = find_parent(batch, item, name_space, before);
    if (!state_.store.publish(number, hash, parent, find_parent_tag(batch, item), batch.was_promoted).ok()) {
        state_.store.abort(number);
        return CommitOutcome::refused;
    }
    return CommitOutcome::readable;
}

EntryNumber Commits::find_parent(const CommitBatch& batch, std::size_t item, const Namespace& name_space,
                                 EntryNumber before) const {
    if (batch.parents.empty()) {
        return kNoEntry;
    }
    const HashWords parent = read_hash(batch.parents.data() + item * kHashBytes);
    if (is_zero(parent)) {
        return kNoEntry;
    }
    const std::uint32_t group = name_space.groups[group_of(batch.space)].anchor;
    // The parent is usually the block just before this one.
    if (before != kNoEntry && group == group_of(batch.space) &&
        parent == read_hash(batch.hashes.data() + (item - 1) * kHashBytes)) {
        return before;
    }
    return find_entry(state_.view, {parent, make_space(name_space.number, group)}).entry;
}

std::uint16_t Commits::find_parent_tag(const CommitBatch& batch, std::size_t item) {
    if (batch.parents.empty()) {
        return 0;
    }
    const HashWords parent = read_hash(batch.parents.data() + item * kHashBytes);
    return is_zero(parent) ? kNoParentTag : parent_tag(parent[0]);
}

}  // namespace kvo
