#include "cache/cache_core.hpp"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

namespace kvo {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

Status check_owner(const CacheOwner& owner) {
    if (owner.domain.size() >= kDomainBytes || owner.domain.find('\0') != std::string::npos) {
        return {Code::invalid, "a domain's name has at most " + std::to_string(kDomainBytes - 1) +
                                   " bytes and no zeros, not " + std::to_string(owner.domain.size())};
    }
    return {};
}

Status check_policy(const CacheOptions& options) {
    return options.policy ? Status() : Status(Code::invalid, "a cache needs a policy that says what goes first");
}

Status check_options(const CacheOptions& options) {
    if (options.pool_bytes == 0 || options.entry_limit == 0) {
        return {Code::invalid, "a cache needs memory for at least one segment and one entry"};
    }
    if (options.entry_limit > kEntryLimitMax) {
        return {Code::invalid, "a cache has at most " + std::to_string(kEntryLimitMax) + " entries"};
    }
    if (options.pool_bytes > kPoolLimit || options.segment_bytes > kPoolLimit) {
        return {Code::invalid, "a cache of " + std::to_string(options.pool_bytes) + " bytes in segments of " +
                                   std::to_string(options.segment_bytes) + " is more than any machine has"};
    }
    if (Status owner = check_owner(options.owner); !owner.ok()) {
        return owner;
    }
    // Whatever would refuse them after the memory has been taken, which takes long.
    if (const auto arena = Arena::create({options.segment_bytes, options.extent_bytes}); !arena.ok()) {
        return arena.fault();
    }
    return check_policy(options);
}

}  // namespace

Result<std::unique_ptr<CacheCore>> CacheCore::create(const CacheOptions& options, PopulateProgress& progress) {
    if (Status status = check_options(options); !status.ok()) {
        return status;
    }
    auto memory = CacheMemory::create(options);
    if (!memory.ok()) {
        return memory.fault();
    }
    auto core = assemble(std::move(memory.value()), options);
    if (!core.ok()) {
        return core;
    }
    if (Status status = core.value()->state_.store.start(); !status.ok()) {
        return status;
    }
    if (!options.is_sparse) {
        if (Status status = core.value()->growth_.take_first(progress); !status.ok()) {
            return status;
        }
    }
    return core;
}

Result<std::unique_ptr<CacheCore>> CacheCore::adopt(CacheFiles files, const CacheOptions& options) {
    if (Status status = check_policy(options); !status.ok()) {
        return status;
    }
    auto memory = CacheMemory::adopt(std::move(files), options);
    if (!memory.ok()) {
        return memory.fault();
    }
    auto core = assemble(std::move(memory.value()), options);
    if (!core.ok()) {
        return core;
    }
    if (Status status = core.value()->take_over(); !status.ok()) {
        return status;
    }
    return core;
}

Result<std::unique_ptr<CacheCore>> CacheCore::assemble(std::unique_ptr<CacheMemory> memory,
                                                       const CacheOptions& options) {
    const IndexView& view = memory->index().view();
    const IndexHeader& header = *view.header;
    auto arena = Arena::create({.segment_bytes = header.segment_bytes, .extent_bytes = header.extent_bytes});
    if (!arena.ok()) {
        return arena.fault();
    }
    // A successor's policies, too, are those of a pool that has grown fully.
    const std::uint64_t capacity = memory->capacity_bytes();
    if (Status status = arena.value().reserve(capacity / header.extent_bytes); !status.ok()) {
        return status;
    }
    const auto ready_extents = static_cast<std::uint32_t>(header.ready_bytes.load() / header.extent_bytes);
    if (Status status = arena.value().add_extents(ready_extents); !status.ok()) {
        return status;
    }
    auto tenants = TenantTable::create(
        view.tenants, options.policy, {.entry_limit = header.entry_limit, .capacity_bytes = capacity}, options.tenants);
    if (Status status = memory->note_boot(options.owner.boot_id); !status.ok()) {
        return status;
    }
    return std::unique_ptr<CacheCore>(
        new CacheCore(std::move(memory), options, std::move(tenants), std::move(arena.value())));
}

CacheCore::CacheCore(std::unique_ptr<CacheMemory> memory, const CacheOptions& options, TenantTable tenants, Arena arena)
    : memory_(std::move(memory)),
      options_(options),
      state_(*memory_, std::move(tenants), std::move(arena)),
      growth_(*memory_, state_.writer, state_.store, options),
      leases_(state_, options.verify),
      reservations_(state_),
      commits_(state_, reservations_),
      removals_(state_, memory_->capacity_bytes()),
      search_(state_) {}

Status CacheCore::take_over() {
    const std::lock_guard lock(state_.writer);
    state_.namespaces.adopt();
    state_.sessions.adopt();
    const EntryNumber entries = state_.view.header->entry_count.load();
    // What the entries say about their leases may be half an acquire or half a release; the lists are whole.
    std::vector<std::uint32_t> leased(entries);
    state_.lease_lists.adopt([&](std::uint32_t session, std::span<const EntryNumber> list) {
        const bool is_sound = state_.sessions.is_known(session) &&
                              std::ranges::all_of(list, [&](EntryNumber entry) { return entry < entries; });
        for (const EntryNumber entry : is_sound ? list : std::span<const EntryNumber>{}) {
            ++leased[entry];
        }
        return is_sound;
    });
    const auto report = state_.store.adopt([&](EntryNumber entry) { return leased[entry]; },
                                           [&](std::uint16_t place) { return state_.sessions.at(place) != 0; });
    if (!report.ok()) {
        return report.fault();
    }
    adoption_ = report.value();
    // Engines name their identities anew to a successor, so those of nobody's blocks may go before they are too many.
    if (state_.namespaces.known() > kNamespaceLimit / 2) {
        state_.namespaces.forget([this](std::uint32_t number) { return !has_entries(number); });
    }
    // Not before: by now no entry has a number that was another tenant's.
    for (const TenantTerms& tenant : options_.tenants.value_or(std::vector<TenantTerms>{})) {
        if (const auto opened = state_.store.tenants().open(tenant.name, tenant.quota_bytes); !opened.ok()) {
            return opened.fault();
        }
    }
    for (EntryNumber entry = 0; entry < entries; ++entry) {
        const EntryWord word(state_.view.entries[entry].word.load());
        if (word.state() == EntryState::reserved) {
            reservations_.adopt(Reservation::of(state_.view.entries[entry].recency.load()).session, entry);
        }
    }
    for (std::uint16_t place = 0; place < kSessionLimit; ++place) {
        if (const SessionId session = state_.sessions.at(place); session != 0) {
            adopt_leases(session);
        }
    }
    return {};
}

// A lease on an entry that could not be kept is none: its number will be another entry's.
void CacheCore::adopt_leases(SessionId session) {
    const auto is_held = [&](EntryNumber entry) {
        return EntryWord(state_.view.entries[entry].word.load()).leases() != 0;
    };
    for (const LeaseId lease : state_.lease_lists.list(session)) {
        bool is_sound = true;
        state_.lease_lists.each_entry(lease, [&](EntryNumber entry) { is_sound = is_sound && is_held(entry); });
        std::vector<EntryNumber> entries;
        if (!is_sound && state_.lease_lists.close(lease, session, entries)) {
            for (const EntryNumber entry : entries) {
                if (is_held(entry)) {
                    state_.view.entries[entry].word.fetch_sub(1);
                    state_.store.end_quarantine(entry);
                }
            }
            continue;
        }
        std::uint64_t bytes = 0;
        state_.lease_lists.each_entry(lease,
                                      [&](EntryNumber entry) { bytes += state_.store.slot_bytes(entry).size(); });
        state_.sessions.charge_adopted(session_place(session), bytes);
    }
}

Result<FileDescriptor> CacheCore::open_index(SessionId session) {
    auto file = memory_->index().open_signed(session_place(session));
    if (file.ok() && !state_.sessions.note_signs(session)) {
        return Status(Code::invalid, "no session " + std::to_string(session) + " is known");
    }
    return file;
}

Result<std::uint32_t> CacheCore::open_namespace(const Fingerprint& fingerprint, const Geometry& geometry) {
    return state_.namespaces.open(fingerprint, geometry);
}

std::vector<std::uint32_t> CacheCore::forget_namespaces(std::span<const std::uint32_t> kept) {
    std::vector<std::uint32_t> sorted(kept.begin(), kept.end());
    std::ranges::sort(sorted);
    // Whoever adds an entry uses its namespace.
    return state_.namespaces.forget(
        [&](std::uint32_t number) { return !std::ranges::binary_search(sorted, number) && !has_entries(number); });
}

bool CacheCore::has_entries(std::uint32_t name_space) const {
    return state_.store.counts().used_by[place_of_namespace(name_space)].load(std::memory_order_relaxed) != 0;
}

Result<TenantNumber> CacheCore::open_tenant(const std::string& name, std::uint64_t quota_bytes) {
    if (auto known = state_.store.tenants().set_quota(name, quota_bytes)) {
        return std::move(*known);
    }
    const std::lock_guard lock(state_.writer);
    return state_.store.tenants().open(name, quota_bytes);
}

std::uint32_t CacheCore::shards_of(Space space) const {
    const NamespaceUse name_space = state_.use_space(space);
    return name_space ? name_space->geometry.groups[group_of(space)].shards : 0;
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
    return reservations_.end_all(session) && state_.sessions.forget(session);
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
    stats.refused = leases.refused.load(kRelaxed) + reservations_.refused();
    stats.duplicates = commits_.duplicates();
    stats.mismatches = leases.mismatches.load(kRelaxed);
    stats.lost_touches = state_.touches.lost();
    stats.index_bytes = memory_->index().segment().held_bytes();
    stats.tenants = state_.store.tenants().usage();
    return stats;
}

std::unique_lock<WriterLock> CacheCore::hold_writer() { return std::unique_lock(state_.writer); }

}  // namespace kvo
