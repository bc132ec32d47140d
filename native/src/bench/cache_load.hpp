// A cache under a load that is made up: records of one size, in chains as requests bring them. Each call times the part
// that is meant and leaves out the making of its hashes.
#pragma once

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/timing.hpp"
#include "cache/cache_core.hpp"

namespace kvo {

struct LoadShape {
    std::uint64_t entries = 0;  // that the pool has room for; a few more may fit
    std::uint64_t record_bytes = 64;
    std::string policy;
    unsigned threads = 2;  // that take the memory
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

    // The same of one chain of the newest half, most of which is there still while another thread
    // stores.
    Timing acquire_newer(std::size_t blocks);

    CacheStats stats() const { return core_->stats(); }

private:
    CacheLoad(std::unique_ptr<CacheCore> core, Space space, SessionId session, std::uint64_t entries);
    std::uint64_t draw_chain(std::uint64_t newest);
    Timing acquire_chain(std::uint64_t number, std::size_t blocks);

    std::unique_ptr<CacheCore> core_;
    const Space space_;
    const SessionId session_;
    const std::uint64_t chains_kept_;
    std::atomic<std::uint64_t> chains_stored_ = 0;
    std::mt19937_64 random_{1};  // of the thread that looks up
};

}  // namespace kvo
