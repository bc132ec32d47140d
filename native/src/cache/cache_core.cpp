#include "cache/cache_core.hpp"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "base/memory_order.hpp"
#include "cache/adoption.hpp"

namespace kvo {
namespace {

// Number of records of all sizes of the curve together, which takes 4 MB with them.
constexpr std::uint64_t kCurveRecords = std::uint64_t{1} << 15;

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
    // Checked here because creating the arena would refuse the options only after the memory has been taken, which
    // takes long.
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
    CacheCore& made = *core.value();
    const auto report =
        Adoption(made.state_, made.reservations_).run(options.tenants.value_or(std::vector<TenantTerms>{}));
    if (!report.ok()) {
        return report.fault();
    }
    made.adoption_ = report.value();
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
      curve_({.pool = {.entry_limit = memory_->index().view().header->entry_limit,
                       .capacity_bytes = memory_->capacity_bytes()},
              .make_policy = options.policy,
              .seed = memory_->index().view().header->seed,
              .record_limit = kCurveRecords}),
      state_(*memory_, std::move(tenants), std::move(arena)),
      growth_(*memory_, state_.writer, state_.store, state_.sessions, options),
      leases_(state_, options.verify),
      reservations_(state_),
      commits_(state_, reservations_),
      removals_(state_, memory_->capacity_bytes()),
      search_(state_) {
    state_.store.follow_by(curve_);
}

Result<FileDescriptor> CacheCore::open_index(SessionId session, bool heeds) {
    auto file = memory_->index().open_signed(session_place(session));
    if (file.ok() && !state_.sessions.note_signs(session, heeds)) {
        return Status(Code::invalid, "no session " + std::to_string(session) + " is known");
    }
    return file;
}

Result<TenantNumber> CacheCore::open_tenant(const std::string& name, std::uint64_t quota_bytes) {
    if (auto known = state_.store.tenants().set_quota(name, quota_bytes)) {
        return std::move(*known);
    }
    const std::lock_guard lock(state_.writer);
    return state_.store.tenants().open(name, quota_bytes);
}

std::size_t CacheCore::reclaim_ended() {
    // One thread at a time: when a place is free again, no search may still run for what its last session left.
    const std::unique_lock lock(reclaiming_, std::try_to_lock);
    if (!lock) {
        return 0;
    }
    // Makes the calls that were left after the last holder of the lock had looked for them.
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

std::uint64_t CacheCore::used_by(std::uint32_t name_space) const {
    return state_.store.counts().used_by[place_of_namespace(name_space)].load(kRelaxed);
}

std::vector<std::pair<std::uint32_t, std::uint64_t>> CacheCore::used_by_each() const {
    std::vector<std::pair<std::uint32_t, std::uint64_t>> found;
    for (const std::uint32_t number : state_.namespaces.list()) {
        if (const std::uint64_t bytes = used_by(number); bytes != 0) {
            found.emplace_back(number, bytes);
        }
    }
    return found;
}

MemoryCurve::Counts CacheCore::memory_curve() {
    // While every block is a hit, no thread reserves, and touches would wait until one does.
    if (state_.writer.try_lock()) {
        const std::lock_guard lock(state_.writer, std::adopt_lock);
        state_.drain_touches();
    }
    return curve_.counts();
}

std::unique_lock<WriterLock> CacheCore::hold_writer() { return std::unique_lock(state_.writer); }

}  // namespace kvo
