// The digest as docs/format.md says it, for the tests: one word after the other, in arithmetic too slow to be wrong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "digest/digest.hpp"

namespace kvo::test {

using Bytes = std::vector<std::uint8_t>;
using Wide = unsigned __int128;

inline constexpr Wide kPrime = (Wide{1} << 64) + 13;

inline Wide widen(const RunDigest& digest) { return Wide{digest.high} << 64 | digest.low; }

inline RunDigest narrow(Wide element) {
    return {static_cast<std::uint64_t>(element), static_cast<std::uint64_t>(element >> 64)};
}

// Multiplies by doubling; both factors are below the prime.
inline Wide multiply_slowly(Wide a, Wide b) {
    Wide product = 0;
    for (; b > 0; b >>= 1, a = (a + a) % kPrime) {
        product = (b & 1) != 0 ? (product + a) % kPrime : product;
    }
    return product;
}

inline RunDigest digest_run_slowly(std::span<const std::uint8_t> bytes, std::uint64_t offset) {
    Wide sum = 0;
    for (std::size_t i = 0; i < bytes.size();) {
        const std::uint64_t word = (offset + i) / 8;
        std::uint64_t value = 0;
        for (; i < bytes.size() && (offset + i) / 8 == word; ++i) {
            value += std::uint64_t{bytes[i]} << 8 * ((offset + i) % 8);
        }
        const Wide keyed = multiply_slowly(value, word_key(word % 512));
        sum = (sum + multiply_slowly(keyed, chunk_multiplier(word / 512))) % kPrime;
    }
    return narrow(sum);
}

inline Bytes random_bytes(std::size_t size, std::mt19937_64& random) {
    Bytes bytes(size);
    std::ranges::generate(bytes, [&] { return static_cast<std::uint8_t>(random()); });
    return bytes;
}

}  // namespace kvo::test
