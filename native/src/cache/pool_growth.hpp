// Growth of a cache's memory, step by step, while the cache is in use.
#pragma once

#include <cstdint>
#include <mutex>

#include "arena/segment.hpp"
#include "cache/cache_memory.hpp"
#include "cache/cache_state.hpp"
#include "cache/entry_store.hpp"

namespace kvo {

// Safe to call from any thread. What it is made with outlives it.
class PoolGrowth {
public:
    PoolGrowth(CacheMemory& memory, WriterLock& writer, EntryStore& store, const CacheOptions& options);

    // Takes the memory of the first step, of which nothing is left to others but what the options say.
    Status take_first(PopulateProgress& progress);

    // Takes the memory of the next step while the cache is in use, and then lets it be used. True: there is more to
    // come. At least a 32nd of the machine's or the cgroup's memory is left to others. Code::unavailable: memory is
    // short; Code::failed: cancelled. Either changes nothing, and it may be called again.
    //
    // While a step is taken, for two seconds of it at most, nothing is evicted to make room: room is about to come, and
    // a reservation that finds none is refused until then.
    Result<bool> grow(PopulateProgress& progress);
    Status grow_fully(PopulateProgress& progress);
    void expect_room(std::uint32_t seconds);

private:
    Result<bool> add_step(PopulateTerms terms, PopulateProgress& progress);
    Result<std::uint64_t> take_step(PopulateTerms terms, PopulateProgress& progress);

    CacheMemory& memory_;
    WriterLock& writer_;
    EntryStore& store_;  // under the writer's lock
    const PopulateTerms populate_;
    const std::uint64_t step_bytes_;
    std::mutex growing_;  // taken before the writer's
};

}  // namespace kvo
