// Growth of a cache's memory, step by step, while the cache is in use, and what of it is given back.
#pragma once

#include <cstdint>
#include <mutex>

#include "arena/segment.hpp"
#include "cache/cache_memory.hpp"
#include "cache/cache_state.hpp"
#include "cache/entry_store.hpp"
#include "cache/session_table.hpp"

namespace kvo {

// The outcome of a call that gives memory back.
struct Shrunk {
    std::uint64_t freed_bytes = 0;   // given back by this call
    std::uint64_t pinned_bytes = 0;  // not in use any more, but an engine's driver has it pinned still
    bool is_done = false;            // all that was asked for is given back
};

// Safe to call from any thread. What it is made with outlives it.
class PoolGrowth {
public:
    PoolGrowth(CacheMemory& memory, WriterLock& writer, EntryStore& store, const SessionTable& sessions,
               const CacheOptions& options);

    // Takes the memory of the first step, of which nothing is left to others but what the options say.
    Status take_first(PopulateProgress& progress);

    // Takes the memory of the next step while the cache is in use, and then lets it be used. True: there is more to
    // come. At least a 32nd of the machine's or the cgroup's memory is left to others, and `keep_free_bytes`. What was
    // to be given back and is still there is used again. Code::unavailable: memory is
    // short; Code::failed: cancelled. Either changes nothing, and it may be called again.
    //
    // While a step is taken, for two seconds of it at most, nothing is evicted to make room: room is about to come, and
    // a reservation that finds none is refused until then.
    Result<bool> grow(PopulateProgress& progress, std::uint64_t keep_free_bytes = 0);
    Status grow_fully(PopulateProgress& progress);

    // Gives back whole segments at the pool's end, so that `target_bytes` stay, rounded up to a segment. The records
    // worth least are evicted, the rest moves to the segments that stay. Records that are leased or reserved keep
    // their segment and those before it: nothing is stored there until they are gone, or the pool grows. So call it
    // again until `is_done`. Code::unavailable: an engine that does not know of this has the memory; Code::invalid: the
    // segments have hugetlb pages, which no other process can use. It blocks for as long as copying 1 GiB takes.
    Result<Shrunk> shrink(std::uint64_t target_bytes);
    void expect_room(std::uint32_t seconds);

private:
    Result<bool> add_step(PopulateTerms terms, PopulateProgress& progress);
    Result<std::uint64_t> take_step(PopulateTerms terms, PopulateProgress& progress);
    void vacate(std::uint32_t segment);
    void use_withdrawn();
    Shrunk free_unused();

    CacheMemory& memory_;
    WriterLock& writer_;
    EntryStore& store_;  // under the writer's lock
    const SessionTable& sessions_;
    const PopulateTerms populate_;
    const std::uint64_t step_bytes_;
    std::mutex growing_;  // taken before the writer's
};

}  // namespace kvo
