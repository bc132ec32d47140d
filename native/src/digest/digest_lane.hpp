// The digest kernel's body: one lane's share of a run's digest, in multiplications of 32 bits. Kernels compile it for
// the device, and the tests compile it for the host.
#pragma once

#include <cstdint>

#include "digest/digest_field.hpp"

namespace kvo {

// Where the run lies and where in its record it begins. `bytes` is a number because the memory may be the device's.
struct DigestRun {
    std::uint64_t bytes;
    std::uint64_t length;
    std::uint64_t offset;
};

namespace digest_lane_detail {

using digest_field::weigh;
using Word = std::uint64_t __attribute__((may_alias));

// Four sums of partial products, by their weights: 1, 2^32 twice, 2^64; and 2^96, which takes what the last one
// carries.
struct PartialSums {
    std::uint64_t low_low = 0;
    std::uint64_t low_high = 0;
    std::uint64_t high_low = 0;
    std::uint64_t high_high = 0;
    std::uint64_t top = 0;

    KVO_HOST_DEVICE void add(std::uint64_t word, std::uint64_t key) {
        const auto word_low = static_cast<std::uint32_t>(word), word_high = static_cast<std::uint32_t>(word >> 32);
        const auto key_low = static_cast<std::uint32_t>(key), key_high = static_cast<std::uint32_t>(key >> 32);
        low_low += std::uint64_t{word_low} * key_low;
        low_high += std::uint64_t{word_low} * key_high;
        high_low += std::uint64_t{word_high} * key_low;
        high_high += std::uint64_t{word_high} * key_high;
    }

    // Call this after at most sixteen calls of add(), before the sums can overflow.
    KVO_HOST_DEVICE void carry() {
        constexpr std::uint64_t kLowHalf = 0xffffffff;
        low_high += low_low >> 32;
        high_high += (low_high >> 32) + (high_low >> 32);
        top += high_high >> 32;
        low_low &= kLowHalf;
        low_high &= kLowHalf;
        high_low &= kLowHalf;
        high_high &= kLowHalf;
    }

    // Fewer than 80 bits.
    KVO_HOST_DEVICE digest_field::Signed weighed() {
        carry();
        return weigh(low_low, low_high + high_low, high_high, top);
    }
};

// Word `word` of the record, with zeros where it lies outside the run.
KVO_HOST_DEVICE inline std::uint64_t load_word(const DigestRun& run, std::uint64_t word) {
    const std::uint64_t at = word * kDigestWordBytes;
    const std::uint64_t address = run.bytes + (at - run.offset);
    const bool is_inside = at >= run.offset && at + kDigestWordBytes <= run.offset + run.length;
    if (is_inside && address % sizeof(Word) == 0) {
        return *reinterpret_cast<const Word*>(address);
    }
    std::uint64_t value = 0;
    for (std::uint64_t i = 0; i < kDigestWordBytes; ++i) {
        if (at + i >= run.offset && at + i < run.offset + run.length) {
            value |= std::uint64_t{*reinterpret_cast<const unsigned char*>(address + i)} << 8 * i;
        }
    }
    return value;
}

}  // namespace digest_lane_detail

// The part of the run's digest that is lane `lane`'s of `lanes`: the parts of all lanes, added in any order, are the
// digest. `keys` has word_key() of 0 to 511, wherever the device reads it fastest. Lanes of one chunk that are as many
// as a warp multiply once for sixteen words.
KVO_HOST_DEVICE inline RunDigest digest_lane(const DigestRun& run, const std::uint64_t* keys, std::uint64_t lane,
                                             std::uint64_t lanes) {
    const std::uint64_t words_end = (run.offset + run.length + kDigestWordBytes - 1) / kDigestWordBytes;
    digest_field::Signed total = 0;
    std::uint64_t word = run.offset / kDigestWordBytes + lane;
    while (run.length > 0 && word < words_end) {
        const std::uint64_t chunk = word / kDigestChunkWords;
        const std::uint64_t chunk_end = (chunk + 1) * kDigestChunkWords;
        const std::uint64_t end = chunk_end < words_end ? chunk_end : words_end;
        digest_lane_detail::PartialSums sums;
        std::uint64_t products = 0;
        for (; word < end; word += lanes) {
            if (products == digest_field::kProductsBeforeCarry) {
                sums.carry();
                products = 0;
            }
            sums.add(digest_lane_detail::load_word(run, word), keys[word % kDigestChunkWords]);
            ++products;
        }
        total += digest_field::multiply(sums.weighed(), chunk_multiplier(chunk));
    }
    return digest_field::reduce(total);
}

}  // namespace kvo
