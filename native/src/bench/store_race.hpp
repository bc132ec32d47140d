// How long one call takes while another thread stores at full speed.
#pragma once

#include <functional>
#include <vector>

#include "bench/cache_load.hpp"

namespace kvo {

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
