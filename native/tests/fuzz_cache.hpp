// Cache operations that the fuzz target and the run over random inputs share.
#pragma once

#include <cstdint>
#include <span>

namespace kvo::test {

// The first bytes choose a cache, the others are operations on it. Throws if it does not do what the model says.
void run_cache_operations(std::span<const std::uint8_t> input);

}  // namespace kvo::test
