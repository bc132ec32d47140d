#include "bench/cache_load.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <thread>
#include <utility>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "replay/make_policy.hpp"

namespace kvo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBlockTokens = 16;
constexpr std::size_t kBatch = CacheLoad::kChainBlocks;
constexpr std::size_t kBatchBytes = kBatch * kHashBytes;
constexpr std::uint64_t kSpareEntries = 1 << 20;
constexpr std::uint64_t kAnyDigest = 1;                         // nothing is ever read
constexpr std::uint64_t kNewer = 2;                             // by so much fewer chains
constexpr std::uint64_t kNeverStored = std::uint64_t{1} << 50;  // and the chains from there on

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Result<std::unique_ptr<CacheLoad>> CacheLoad::create(const LoadShape& shape) {
    const auto policy = find_policy(shape.policy);
    if (!policy.ok()) {
        return policy.fault();
    }
    CacheOptions options;
    options.segment_bytes = shape.segment_bytes;
    options.pool_bytes = shape.entries * shape.record_bytes;
    options.entry_limit = static_cast<EntryNumber>(shape.entries + shape.entries / 8 + kSpareEntries);
    options.is_sparse = shape.is_sparse;
    options.policy = policy.value();
    options.populate.threads = shape.threads;
    PopulateProgress progress;
    auto core = CacheCore::create(options, progress);
    if (!core.ok()) {
        return core.fault();
    }
    if (!shape.is_sparse) {
        if (Status status = core.value()->growth().grow_fully(progress); !status.ok()) {
            return status;
        }
    }
    const auto name_space = core.value()->namespaces().open(
        {}, {.hash_block_size = kBlockTokens,
             .groups = {{.record_bytes = shape.record_bytes, .block_size = kBlockTokens}}});
    if (!name_space.ok()) {
        return name_space.fault();
    }
    std::unique_ptr<CacheLoad> load(
        new CacheLoad(std::move(core.value()), options, make_space(name_space.value(), 0), shape));
    if (Status status = load->open_users(shape); !status.ok()) {
        return status;
    }
    return load;
}

CacheLoad::CacheLoad(std::unique_ptr<CacheCore> core, const CacheOptions& options, Space space, const LoadShape& shape)
    : core_(std::move(core)),
      options_(options),
      space_(space),
      chains_kept_(std::max<std::uint64_t>(shape.entries / kBatch, 1)) {}

Status CacheLoad::open_users(const LoadShape& shape) {
    for (std::uint32_t i = 0; i < std::max<std::uint32_t>(shape.sessions, 1); ++i) {
        const auto session = core_->sessions().open(UINT64_MAX);
        if (!session.ok()) {
            return session.fault();
        }
        sessions_.push_back(session.value());
    }
    tenants_ = std::max<std::uint32_t>(shape.tenants, 1);
    for (std::uint32_t i = 1; i < tenants_; ++i) {
        const auto tenant = core_->open_tenant("tenant" + std::to_string(i), options_.pool_bytes / tenants_);
        if (!tenant.ok()) {
            return tenant.fault();
        }
    }
    return {};
}

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
        const auto tenant = static_cast<TenantNumber>(chain % tenants_);
        const auto reserved = core_->reservations().reserve(session(), tenant, space_, {}, tickets);
        const bool is_whole =
            reserved.ok() && reserved.value() == kBatch &&
            core_->commits().commit(session(), {space_, 0, tickets, hashes, parents, digests}, outcomes).ok();
        timing.seconds += seconds_since(start);
        if (!is_whole) {
            (void)core_->reservations().abort(session(),
                                              std::span(tickets).first(reserved.ok() ? reserved.value() : 0));
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

Timing CacheLoad::acquire_missing(std::size_t chains, std::size_t blocks) {
    Timing all;
    for (std::size_t i = 0; i < chains; ++i) {
        const std::uint64_t missed = core_->stats().misses;
        all.seconds += acquire_chain(kNeverStored + random_() % kNeverStored, blocks).seconds;
        all.done += core_->stats().misses - missed;
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
    const auto acquired = core_->leases().acquire(session(), query);
    Timing timing{seconds_since(start), 0};
    if (acquired.ok() && acquired.value().outcome == AcquireOutcome::hit) {
        timing.done = acquired.value().boundary / kBlockTokens;
        core_->leases().release(session(), acquired.value().lease);
    }
    return timing;
}

Result<Timing> CacheLoad::adopt() {
    const auto copy = [](int file) { return FileDescriptor(fcntl(file, F_DUPFD_CLOEXEC, 0)); };
    const FileNumbers own = core_->memory().files();
    CacheFiles files{.lock = copy(own.lock), .index = copy(own.index), .segments = {}};
    std::ranges::transform(own.segments, std::back_inserter(files.segments), copy);
    core_.reset();
    const auto start = Clock::now();
    auto core = CacheCore::adopt(std::move(files), options_);
    const double seconds = seconds_since(start);
    if (!core.ok()) {
        return core.fault();
    }
    core_ = std::move(core.value());
    sessions_.clear();
    const auto session = core_->sessions().open(UINT64_MAX);
    if (!session.ok()) {
        return session.fault();
    }
    sessions_.push_back(session.value());
    return Timing{seconds, core_->adoption().readable};
}

Timing CacheLoad::walk(std::size_t batches) {
    constexpr std::size_t kAhead = 32;  // as a look-up asks in advance
    struct Pair {
        const std::atomic<std::uint64_t>* bucket;
        const std::atomic<std::uint64_t>* entry;
    };
    const IndexView& view = core_->memory().index().view();
    const std::uint64_t buckets = view.header->bucket_count.load(std::memory_order_acquire);
    const std::uint64_t entries = view.header->entry_count.load(std::memory_order_acquire);
    if (entries == 0) {
        return {};
    }
    std::vector<Pair> pairs(batches * kBatch);
    for (Pair& pair : pairs) {
        pair = {&view.buckets[random_() % buckets].low_tags, &view.entries[random_() % entries].word};
    }
    const auto start = Clock::now();
    for (std::size_t begin = 0; begin < pairs.size(); begin += kAhead) {
        const auto group = std::span(pairs).subspan(begin, std::min(kAhead, pairs.size() - begin));
        for (const Pair& pair : group) {
            __builtin_prefetch(pair.bucket);
            __builtin_prefetch(pair.entry);
        }
        for (const Pair& pair : group) {
            seen_ += pair.bucket->load(std::memory_order_relaxed) + pair.entry->load(std::memory_order_relaxed);
        }
    }
    return {seconds_since(start), pairs.size()};
}

// One of so many of the newest.
std::uint64_t CacheLoad::draw_chain(std::uint64_t newest) {
    const std::uint64_t stored = chains_stored_.load(std::memory_order_acquire);
    return stored == 0 ? 0 : stored - 1 - random_() % std::clamp<std::uint64_t>(newest, 1, stored);
}

namespace {

// Resident, and not of a file: shared memory counts as a file.
Result<std::uint64_t> read_private_bytes() {
    std::ifstream file("/proc/self/statm");
    std::uint64_t size = 0, resident = 0, shared = 0;
    if (!(file >> size >> resident >> shared) || resident < shared) {
        return Status(Code::unavailable, "/proc/self/statm does not say what this process holds");
    }
    return (resident - shared) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Result<std::vector<GrowthStep>> measure_growth(const LoadShape& shape, std::uint64_t step) {
#if defined(__GLIBC__)
    malloc_trim(0);  // what was freed before would be taken again without being seen
#endif
    const auto before = read_private_bytes();
    if (!before.ok()) {
        return before.fault();
    }
    const auto load = CacheLoad::create(shape);
    if (!load.ok()) {
        return load.fault();
    }
    std::vector<GrowthStep> steps;
    for (std::uint64_t entries = 0; entries < shape.entries;) {
        const std::uint64_t stored = load.value()->store(std::min(step, shape.entries - entries)).done;
        const auto now = read_private_bytes();
        if (stored == 0 || !now.ok()) {
            return stored == 0 ? Status(Code::failed, "the cache takes no more entries") : now.fault();
        }
        entries += stored;
        const std::uint64_t growth = now.value() > before.value() ? now.value() - before.value() : 0;
        steps.push_back({entries, load.value()->stats().index_bytes, growth});
    }
    return steps;
}

RaceOutcome race_stores(CacheLoad& load, std::uint64_t calls, std::uint64_t wanted,
                        const std::function<Timing()>& call) {
    RaceOutcome outcome;
    outcome.calls = calls;
    outcome.seconds.reserve(calls);
    std::atomic<bool> is_over = false;
    std::atomic<bool> has_begun = false;
    std::atomic<std::uint64_t> stored = 0;
    {
        const std::jthread writer([&] {
            do {
                stored.fetch_add(load.store(CacheLoad::kChainBlocks).done);
                has_begun.store(true);
                has_begun.notify_one();
            } while (!is_over.load());
        });
        has_begun.wait(false);
        for (std::uint64_t i = 0; i < calls; ++i) {
            if (const Timing timing = call(); timing.done == wanted) {
                outcome.seconds.push_back(timing.seconds);
            }
        }
        is_over.store(true);
    }
    outcome.stored = stored.load();
    std::ranges::sort(outcome.seconds);
    return outcome;
}

}  // namespace kvo
