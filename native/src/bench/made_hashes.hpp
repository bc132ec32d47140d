// Block hashes for loads that are made up: the hash of a number, the same every time.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

#include "index/layout.hpp"

namespace kvo {

// Writes the hashes of numbers `first`, `first` + 1 and so on, 32 bytes each, none of them zero.
inline void make_hashes(std::uint64_t first, std::span<std::uint8_t> hashes) {
    for (std::size_t at = 0; at + kHashBytes <= hashes.size(); at += kHashBytes) {
        HashWords words;
        std::uint64_t state = first++;
        for (std::uint64_t& word : words) {
            // splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)
            state += 0x9e3779b97f4a7c15;
            word = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
            word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
            word ^= word >> 31;
        }
        std::memcpy(hashes.data() + at, words.data(), kHashBytes);
    }
}

}  // namespace kvo
