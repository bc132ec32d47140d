// What a cache's bookkeeping takes of memory while it fills, its records not counted.
#pragma once

#include <vector>

#include "bench/cache_load.hpp"

namespace kvo {

struct GrowthStep {
    std::uint64_t entries = 0;
    std::uint64_t index_bytes = 0;    // of the index file
    std::uint64_t private_bytes = 0;  // of this process, beyond what it had before the cache was made
};

// A cache of this shape from its first entry to its last, looked at every `step` entries. Whatever else this process
// takes meanwhile counts too. Linux; Code::unavailable without /proc.
Result<std::vector<GrowthStep>> measure_growth(const LoadShape& shape, std::uint64_t step);

}  // namespace kvo
