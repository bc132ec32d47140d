#include "bench/turnover_load.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "bench/cache_load.hpp"
#include "replay/make_policy.hpp"

namespace kvo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kAttentionGroups = 2;
constexpr std::uint32_t kBlockTokens = 16;
constexpr std::uint64_t kAnyDigest = 1;     // nothing is ever read
constexpr std::uint64_t kChainBlocks = 64;  // on average
constexpr std::size_t kStoredLimit = 1u << 18;
constexpr std::uint64_t kSmallestRecord = 4096;

Geometry make_geometry(const std::vector<std::uint64_t>& record_bytes) {
    Geometry geometry{.hash_block_size = kBlockTokens, .groups = {}};
    for (std::size_t i = 0; i < record_bytes.size(); ++i) {
        const BoundaryRule rule = i < kAttentionGroups           ? BoundaryRule::prefix
                                  : i + 1 == record_bytes.size() ? BoundaryRule::exact
                                                                 : BoundaryRule::window;
        geometry.groups.push_back({.record_bytes = record_bytes[i],
                                   .block_size = kBlockTokens,
                                   .window = rule == BoundaryRule::window ? 8 * kBlockTokens : 0,
                                   .rule = rule});
    }
    return geometry;
}

}  // namespace

Result<std::unique_ptr<TurnoverLoad>> TurnoverLoad::create(const TurnoverShape& shape) {
    if (shape.record_bytes.size() <= kAttentionGroups || shape.byte_shares.size() != shape.record_bytes.size()) {
        return Status(Code::invalid, "a load needs three sizes or more, and a share for each");
    }
    const auto policy = find_policy(shape.policy);
    if (!policy.ok()) {
        return policy.fault();
    }
    CacheOptions options;
    options.pool_bytes = shape.pool_bytes;
    options.segment_bytes = shape.segment_bytes;
    options.entry_limit =
        static_cast<EntryNumber>(std::min<std::uint64_t>(shape.pool_bytes / kSmallestRecord + 1024, kEntryLimitMax));
    options.policy = policy.value();
    options.populate.threads = shape.threads;
    PopulateProgress progress;
    auto core = CacheCore::create(options, progress);
    if (!core.ok()) {
        return core.fault();
    }
    if (Status status = core.value()->growth().grow_fully(progress); !status.ok()) {
        return status;
    }
    const auto name_space = core.value()->namespaces().open({}, make_geometry(shape.record_bytes));
    if (!name_space.ok()) {
        return name_space.fault();
    }
    const auto session = core.value()->sessions().open(UINT64_MAX);
    if (!session.ok()) {
        return session.fault();
    }
    return std::unique_ptr<TurnoverLoad>(
        new TurnoverLoad(std::move(core.value()), name_space.value(), session.value(), shape));
}

TurnoverLoad::TurnoverLoad(std::unique_ptr<CacheCore> core, std::uint32_t name_space, SessionId session,
                           const TurnoverShape& shape)
    : core_(std::move(core)),
      name_space_(name_space),
      session_(session),
      mix_(shape.record_bytes, shape.byte_shares),
      random_(shape.seed),
      newest_(shape.record_bytes.size()) {}

TurnoverOutcome TurnoverLoad::run(double turnovers) {
    const std::uint64_t capacity = core_->stats().capacity_bytes;
    const std::uint64_t moved_before = core_->stats().moved_bytes;
    const auto end = static_cast<std::uint64_t>(turnovers * static_cast<double>(capacity));
    const auto start = Clock::now();
    TurnoverOutcome outcome;
    UsageMeter meter;
    while (outcome.offered_bytes < end) {
        const std::size_t group = mix_.draw_number(random_);
        const std::uint64_t bytes = mix_.sizes()[group];
        outcome.offered_bytes += bytes;
        if (store(group)) {
            outcome.admitted_bytes += bytes;
        } else {
            ++outcome.refused;
        }
        use_one_again();
        meter.see(core_->stats().used_bytes, capacity);
    }
    outcome.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    outcome.moved_bytes = core_->stats().moved_bytes - moved_before;
    outcome.mean_usage = meter.mean();
    outcome.lowest_usage = meter.lowest();
    return outcome;
}

bool TurnoverLoad::store(std::size_t group) {
    const Space space = make_space(name_space_, static_cast<std::uint32_t>(group));
    std::array<Ticket, 1> ticket{};
    const auto reserved = core_->reservations().reserve(session_, 0, space, {}, ticket);
    if (!reserved.ok() || reserved.value() != 1) {
        return false;
    }
    Hash hash;
    make_hashes(next_number_, hash);
    const Hash parent = choose_parent(group);
    const std::array<std::uint64_t, 1> digest{kAnyDigest};
    std::array<CommitOutcome, 1> outcome{CommitOutcome::stale};
    (void)core_->commits().commit(session_, {space, 0, ticket, hash, parent, digest}, outcome);
    newest_[group] = hash;
    if (stored_.size() < kStoredLimit) {
        stored_.push_back({next_number_, group});
    } else {
        stored_[next_number_ % kStoredLimit] = {next_number_, group};
    }
    ++next_number_;
    return outcome[0] == CommitOutcome::readable;
}

// Attention blocks come in chains; windows and states belong to the newest block of the first group.
TurnoverLoad::Hash TurnoverLoad::choose_parent(std::size_t group) {
    if (group >= kAttentionGroups) {
        return newest_[0];
    }
    return random_() % kChainBlocks == 0 ? Hash{} : newest_[group];
}

void TurnoverLoad::use_one_again() {
    if (stored_.empty()) {
        return;
    }
    const Stored& one = stored_[random_() % stored_.size()];
    Hash hash;
    make_hashes(one.number, hash);
    const Space space = make_space(name_space_, static_cast<std::uint32_t>(one.group));
    const auto acquired = core_->leases().acquire_entries(session_, space, hash);
    if (acquired.ok() && acquired.value().outcome == AcquireOutcome::hit) {
        core_->leases().release(session_, acquired.value().lease);
    }
}

}  // namespace kvo
