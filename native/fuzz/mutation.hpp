// Inputs made of others, without a fuzzer: what a test that needs no other compiler runs.
#pragma once

#include <random>
#include <span>

#include "target.hpp"

namespace kvo::fuzz {

// One of these, changed in some places; what follows from `random` alone.
Bytes mutate(std::span<const Bytes> seeds, std::mt19937_64& random);

}  // namespace kvo::fuzz
