// A cache under a load that is made up: records of one size, in chains as requests bring them. Each call times the part
// that is meant and leaves out the making of its hashes.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cache/cache_core.hpp"
#include "index/layout.hpp"

namespace kvo {

// The result of a measured call. `done`: number of records, hashes or leased blocks that turned out as they should. A
// caller that needs all of them must compare.
struct Timing {
    double seconds = 0;
    std::uint64_t done = 0;
};

// Block hashes for loads that are made up: the hash of a number, the same every time. Writes the hashes of numbers
// `first`, `first` + 1 and so on, 32 bytes each, none of them zero.
inline void make_hashes(std::uint64_t first, std::span<std::uint8_t> hashes) {
    for (std::size_t at = 0; at + kHashBytes <= hashes.size(); at += kHashBytes) {
        HashWords words;
        std::uint64_t state = first++;
        for (std::uint64_t& word : words) {
            // splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)
            state += 0x9e3779b97f4a7c15;
            word = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
            word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
            word ^= word >> 31;
        }
        std::memcpy(hashes.data() + at, words.data(), kHashBytes);
    }
}

struct LoadShape {
    std::uint64_t entries = 0;  // that the pool has room for; a few more may fit
    std::uint64_t record_bytes = 64;
    std::string policy;
    unsigned threads = 2;  // that take the memory
    std::uint64_t segment_bytes = std::uint64_t{64} << 20;
    bool is_sparse = false;  // no record has pages: pools larger than the machine
    std::uint32_t sessions = 1;
    std::uint32_t tenants =
        1;  // chains are theirs in turn; each but the first has an equal part of the pool as its quota
};

// One thread at a time stores; one other may look up and acquire meanwhile.
class CacheLoad {
public:
    static constexpr std::size_t kChainBlocks = 1000;

    static Result<std::unique_ptr<CacheLoad>> create(const LoadShape& shape);

    // Reserves and commits whole chains of new records, at least so many. When memory is full each evicts another one.
    Timing store(std::uint64_t records);

    // Batches of a thousand hashes, drawn from as many of the newest records as there is room for.
    Timing look_up(std::size_t batches);

    // The first `blocks` blocks of chains drawn likewise, a chain a call. They are released off the clock.
    Timing acquire(std::size_t chains, std::size_t blocks);

    // The same for chains that were never stored; `done` counts the misses.
    Timing acquire_missing(std::size_t chains, std::size_t blocks);

    // The same for one chain of the newest half, most of which is still there while another thread stores.
    Timing acquire_newer(std::size_t blocks);

    // Leaves the cache as a process that ends would, and takes it over as a new one; `done` counts the entries that are
    // readable afterwards. No other thread may use it meanwhile.
    Result<Timing> adopt();

    // Reads `batches` thousands of pairs of cache lines of the index, both drawn at random: the least that a look-up in
    // a table of this size costs.
    Timing walk(std::size_t batches);

    CacheStats stats() const { return core_->stats(); }

private:
    CacheLoad(std::unique_ptr<CacheCore> core, const CacheOptions& options, Space space, const LoadShape& shape);
    Status open_users(const LoadShape& shape);
    SessionId session() const { return sessions_.back(); }
    std::uint64_t draw_chain(std::uint64_t newest);
    Timing acquire_chain(std::uint64_t number, std::size_t blocks);

    std::unique_ptr<CacheCore> core_;
    const CacheOptions options_;
    const Space space_;
    const std::uint64_t chains_kept_;
    std::vector<SessionId> sessions_ = {};  // chains are stored and acquired by the last one
    std::uint32_t tenants_ = 1;
    std::uint64_t seen_ = 0;
    std::atomic<std::uint64_t> chains_stored_ = 0;
    std::mt19937_64 random_{1};  // of the thread that looks up
};

// Measures the memory that a cache's bookkeeping takes while the cache fills, without the records.

struct GrowthStep {
    std::uint64_t entries = 0;
    std::uint64_t index_bytes = 0;    // of the index file
    std::uint64_t private_bytes = 0;  // of this process, beyond what it had before the cache was made
};

// Fills a cache of this shape from its first entry to its last and measures it every `step` entries. Other memory that
// this process takes meanwhile counts too. Linux; Code::unavailable without /proc.
Result<std::vector<GrowthStep>> measure_growth(const LoadShape& shape, std::uint64_t step);

// How long one call takes while another thread stores at full speed.

struct RaceOutcome {
    std::vector<double> seconds;  // of the calls that did what they should, shortest first
    std::uint64_t calls = 0;
    std::uint64_t stored = 0;  // records, by the other thread
};

// Makes `calls` calls, each of which should get `wanted` done; the other thread has begun before the first and ends
// after the last, whether or not it can store.
RaceOutcome race_stores(CacheLoad& load, std::uint64_t calls, std::uint64_t wanted,
                        const std::function<Timing()>& call);

}  // namespace kvo
