// Measures the memory that a cache's bookkeeping takes while the cache fills, without the records.
#pragma once

#include <vector>

#include "bench/cache_load.hpp"

namespace kvo {

struct GrowthStep {
    std::uint64_t entries = 0;
    std::uint64_t index_bytes = 0;    // of the index file
    std::uint64_t private_bytes = 0;  // of this process, beyond what it had before the cache was made
};

// Fills a cache of this shape from its first entry to its last and measures it every `step` entries. Other memory that
// this process takes meanwhile counts too. Linux; Code::unavailable without /proc.
Result<std::vector<GrowthStep>> measure_growth(const LoadShape& shape, std::uint64_t step);

}  // namespace kvo
