// The requests of a trace, packed for being replayed many times: four bytes a reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.hpp"

namespace kvo {

// Blocks are numbered in the order they first appear, so a parent's number is below its children's.
using BlockNumber = std::uint32_t;
constexpr BlockNumber kNoBlock = 0xffffffff;

class ReplayTrace {
public:
    // The full blocks of one more request. A block is what it is by its id and all ids before it, as in any prefix
    // cache: an id that follows another one is another block. No ids: no request. Code::invalid beyond 2**32 - 1
    // references.
    Status add(std::span<const std::uint64_t> ids);

    std::size_t request_count() const noexcept { return ends_.size(); }
    std::size_t reference_count() const noexcept { return references_.size(); }
    std::size_t block_count() const noexcept { return parents_.size(); }
    // The sum of the squares of the requests' lengths.
    std::uint64_t reference_squares() const noexcept { return reference_squares_; }

    std::span<const BlockNumber> request(std::size_t at) const noexcept;
    BlockNumber parent(BlockNumber block) const noexcept { return parents_[block]; }
    // Blocks from the start of the prompt to this one, itself included.
    std::uint32_t depth(BlockNumber block) const noexcept { return depths_[block]; }

private:
    struct Key {
        std::uint64_t id;
        BlockNumber parent;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        std::size_t operator()(const Key& key) const noexcept;
    };

    std::vector<BlockNumber> references_;
    std::uint64_t reference_squares_ = 0;
    std::vector<std::uint32_t> ends_;
    std::vector<BlockNumber> parents_;
    std::vector<std::uint32_t> depths_;
    std::unordered_map<Key, BlockNumber, KeyHash> numbers_;
};

// Spreads a number over 64 bits (the finaliser of SplitMix64).
constexpr std::uint64_t spread_bits(std::uint64_t number) noexcept {
    number += 0x9e3779b97f4a7c15;
    number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
    number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
    return number ^ (number >> 31);
}

}  // namespace kvo
