// The numbers of the record digest: the field it sums in, and what every word is multiplied by. docs/format.md is the
// specification; this is its arithmetic, for the host and for the device.
#pragma once

#include <cstdint>

#if !defined(KVO_HOST_DEVICE)
#if defined(__CUDACC__)
#define KVO_HOST_DEVICE __host__ __device__
#else
#define KVO_HOST_DEVICE
#endif
#endif

namespace kvo {

// A record is hashed as words of 8 bytes, little-endian, in chunks of 512. Word j of chunk c counts
// word * word_key(j) * chunk_multiplier(c), and all of them are summed modulo the prime 2^64 + 13.
inline constexpr std::uint64_t kDigestWordBytes = 8;
inline constexpr std::uint64_t kDigestChunkWords = 512;
inline constexpr std::uint64_t kDigestChunkBytes = kDigestChunkWords * kDigestWordBytes;

// An element of that field. `high` is 1 for the thirteen values from 2^64 on, else 0.
struct RunDigest {
    std::uint64_t low = 0;
    std::uint64_t high = 0;

    friend bool operator==(const RunDigest&, const RunDigest&) = default;
};

namespace digest_field {

using Signed = __int128;
using Unsigned = unsigned __int128;

inline constexpr std::uint64_t kPrimeAbove = 13;  // 2^64 is congruent to -13
inline constexpr Signed kPrime = (Signed{1} << 64) + Signed{kPrimeAbove};

// A congruent number of fewer than 70 bits.
KVO_HOST_DEVICE constexpr Signed shorten(Unsigned product) {
    return Signed{static_cast<std::uint64_t>(product)} -
           Signed{static_cast<std::uint64_t>(product >> 64)} * Signed{kPrimeAbove};
}

// The smallest representative of a number of fewer than 120 bits. No branches: no processor could guess them.
KVO_HOST_DEVICE constexpr RunDigest reduce(Signed number) {
    const auto above = static_cast<std::int64_t>(number >> 64);
    Signed folded = Signed{static_cast<std::uint64_t>(number)} - Signed{above} * Signed{kPrimeAbove};
    folded += kPrime & folded >> 127;
    folded -= kPrime & ~((folded - kPrime) >> 127);
    return {static_cast<std::uint64_t>(folded), static_cast<std::uint64_t>(folded >> 64)};
}

// Congruent to number * factor. Of fewer than 85 bits if the number has fewer than 80.
KVO_HOST_DEVICE constexpr Signed multiply(Signed number, std::uint64_t factor) {
    const auto above = static_cast<std::int64_t>(number >> 64);
    const Unsigned product = Unsigned{static_cast<std::uint64_t>(number)} * factor;
    return shorten(product) - Signed{above * std::int64_t{kPrimeAbove}} * Signed{factor};
}

KVO_HOST_DEVICE constexpr RunDigest add(const RunDigest& a, const RunDigest& b) {
    return reduce(Signed{a.low} + Signed{b.low} - Signed{(a.high + b.high) * kPrimeAbove});
}

// The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014): a
// bijection in which every input bit reaches every output bit.
KVO_HOST_DEVICE constexpr std::uint64_t mix(std::uint64_t number) {
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9;
    number = (number ^ number >> 27) * 0x94d049bb133111eb;
    return number ^ number >> 31;
}

inline constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15;       // of SplitMix64: 2^64 / golden ratio
inline constexpr std::uint64_t kWordSeed = 0x243f6a8885a308d3;   // pi - 3, its first 64 bits
inline constexpr std::uint64_t kChunkSeed = 0xb7e151628aed2a6a;  // e - 2, its first 64 bits

// Two limbs of 28 bits, at bits 0 and 32. A limb times half a word has 60 bits, so sixteen such products can be added
// in 64 bits before anything must be carried.
inline constexpr std::uint64_t kLimbsOfKey = 0x0fffffff0fffffff;
inline constexpr std::uint64_t kProductsBeforeCarry = 16;

// From sums of partial products, each of fewer than 59 bits, with the weights 1, 2^32, 2^64, 2^96.
KVO_HOST_DEVICE constexpr Signed weigh(std::uint64_t ones, std::uint64_t halves, std::uint64_t wholes,
                                       std::uint64_t tops) {
    const auto low = static_cast<std::int64_t>(ones - wholes * kPrimeAbove);
    const auto high = static_cast<std::int64_t>(halves - tops * kPrimeAbove);
    return Signed{low} + Signed{high} * (Signed{1} << 32);
}

}  // namespace digest_field

// The key of word `word`, 0 to 511, of any chunk.
KVO_HOST_DEVICE constexpr std::uint64_t word_key(std::uint64_t word) {
    return digest_field::mix(digest_field::kWordSeed + word * digest_field::kStep) & digest_field::kLimbsOfKey;
}

// Different for all chunks, as `mix` is a bijection, and 0 for none that a record can have (a test looks).
KVO_HOST_DEVICE constexpr std::uint64_t chunk_multiplier(std::uint64_t chunk) {
    return digest_field::mix(digest_field::kChunkSeed + chunk * digest_field::kStep);
}

}  // namespace kvo
