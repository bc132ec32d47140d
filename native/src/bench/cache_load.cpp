#include "bench/cache_load.hpp"

#include <algorithm>
#include <array>
#include <chrono>

#include "bench/made_hashes.hpp"
#include "replay/make_policy.hpp"

namespace kvo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBlockTokens = 16;
constexpr std::size_t kBatch = CacheLoad::kChainBlocks;
constexpr std::size_t kBatchBytes = kBatch * kHashBytes;
constexpr std::uint64_t kSegmentBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kAnyDigest = 1;  // nothing is ever read
constexpr std::uint64_t kNewer = 2;      // by so much fewer chains

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Result<std::unique_ptr<CacheLoad>> CacheLoad::create(const LoadShape& shape) {
    const auto policy = find_policy(shape.policy);
    if (!policy.ok()) {
        return policy.fault();
    }
    CacheOptions options;
    options.segment_bytes = kSegmentBytes;
    options.pool_bytes = shape.entries * shape.record_bytes;
    options.entry_limit = static_cast<EntryNumber>(shape.entries + shape.entries / 8 + kSegmentBytes / 64);
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
    const auto name_space = core.value()->namespaces().open(
        {}, {.hash_block_size = kBlockTokens,
             .groups = {{.record_bytes = shape.record_bytes, .block_size = kBlockTokens}}});
    if (!name_space.ok()) {
        return name_space.fault();
    }
    const auto session = core.value()->sessions().open(UINT64_MAX);
    if (!session.ok()) {
        return session.fault();
    }
    return std::unique_ptr<CacheLoad>(
        new CacheLoad(std::move(core.value()), make_space(name_space.value(), 0), session.value(), shape.entries));
}

CacheLoad::CacheLoad(std::unique_ptr<CacheCore> core, Space space, SessionId session, std::uint64_t entries)
    : core_(std::move(core)),
      space_(space),
      session_(session),
      chains_kept_(std::max<std::uint64_t>(entries / kBatch, 1)) {}

Timing CacheLoad::store(std::uint64_t records) {
    std::vector<std::uint8_t> hashes(kBatchBytes);
    std::vector<std::uint8_t> parents(kBatchBytes);  // the first of a chain has none
    const std::vector<std::uint64_t> digests(kBatch, kAnyDigest);
    std::vector<Ticket> tickets(kBatch);
    std::vector<CommitOutcome> outcomes(kBatch);
    Timing timing;
    for (std::uint64_t asked = 0; asked < records; asked += kBatch) {
        const std::uint64_t chain = chains_stored_.load(std::memory_order_relaxed);
        make_hashes(chain * kBatch, hashes);
        std::copy(hashes.begin(), hashes.end() - kHashBytes, parents.begin() + kHashBytes);
        const auto start = Clock::now();
        const auto reserved = core_->reservations().reserve(session_, 0, space_, {}, tickets);
        const bool is_whole =
            reserved.ok() && reserved.value() == kBatch &&
            core_->commits().commit(session_, {space_, 0, tickets, hashes, parents, digests}, outcomes).ok();
        timing.seconds += seconds_since(start);
        if (!is_whole) {
            (void)core_->reservations().abort(session_, std::span(tickets).first(reserved.ok() ? reserved.value() : 0));
            break;
        }
        timing.done += static_cast<std::uint64_t>(std::ranges::count(outcomes, CommitOutcome::readable));
        chains_stored_.store(chain + 1, std::memory_order_release);
    }
    return timing;
}

Timing CacheLoad::look_up(std::size_t batches) {
    std::vector<std::uint8_t> hashes(batches * kBatchBytes);
    for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
        make_hashes(draw_chain(chains_kept_) * kBatch + random_() % kBatch, std::span(hashes).subspan(at, kHashBytes));
    }
    std::vector<std::uint8_t> found(batches * kBatch);
    const auto start = Clock::now();
    for (std::size_t i = 0; i < batches; ++i) {
        (void)core_->search().lookup(space_, std::span(hashes).subspan(i * kBatchBytes, kBatchBytes),
                                     std::span(found).subspan(i * kBatch, kBatch));
    }
    return {seconds_since(start), static_cast<std::uint64_t>(std::ranges::count(found, 1))};
}

Timing CacheLoad::acquire(std::size_t chains, std::size_t blocks) {
    Timing all;
    for (std::size_t i = 0; i < chains; ++i) {
        const Timing one = acquire_chain(draw_chain(chains_kept_), blocks);
        all.seconds += one.seconds;
        all.done += one.done;
    }
    return all;
}

Timing CacheLoad::acquire_newer(std::size_t blocks) { return acquire_chain(draw_chain(chains_kept_ / kNewer), blocks); }

Timing CacheLoad::acquire_chain(std::uint64_t number, std::size_t blocks) {
    std::array<std::uint8_t, kBatchBytes> hashes;
    const auto chain = std::span(hashes).first(std::min(blocks, kBatch) * kHashBytes);
    make_hashes(number * kBatch, chain);
    const BoundaryQuery query{.name_space = namespace_of(space_), .chain = chain, .limit = blocks * kBlockTokens};
    const auto start = Clock::now();
    const auto acquired = core_->leases().acquire(session_, query);
    Timing timing{seconds_since(start), 0};
    if (acquired.ok() && acquired.value().outcome == AcquireOutcome::hit) {
        timing.done = acquired.value().boundary / kBlockTokens;
        core_->leases().release(session_, acquired.value().lease);
    }
    return timing;
}

// One of so many of the newest.
std::uint64_t CacheLoad::draw_chain(std::uint64_t newest) {
    const std::uint64_t stored = chains_stored_.load(std::memory_order_acquire);
    return stored == 0 ? 0 : stored - 1 - random_() % std::clamp<std::uint64_t>(newest, 1, stored);
}

}  // namespace kvo
