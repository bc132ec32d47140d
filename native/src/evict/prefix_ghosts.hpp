// Names the prefix policy remembers after eviction: their class and the epoch of their last use, in four bytes.
//
// Sets of sixteen places, a cache line each, newest first; the last makes way. The home, a hash that a few neighbours
// share, chooses the set. A name is told from others in it by 15 bits that are not all 0: one in two thousand look-ups
// finds another's, which costs a little accuracy and nothing else.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "evict/entry_lists.hpp"
#include "evict/prefix_ages.hpp"

namespace kvo {

struct Ghost {
    std::size_t kind = 0;
    std::uint16_t epoch = 0;
    bool is_found = false;
};

class PrefixGhosts {
public:
    PrefixGhosts() { sets_.grow_to(0); }

    // Makes place for that many, one set more each call at most; never fewer.
    void grow_to(std::uint64_t limit) {
        if (limit / kPlaces < set_count_) {
            return;
        }
        // A set is split in two like this: both get all of it, and the half that is now in the wrong one ages.
        const Set split = sets_.grow_to(set_count_ - std::bit_floor(set_count_));
        sets_.grow_to(set_count_) = split;
        set_count_ += 1;
    }

    // Where its set lies, to ask for the memory in advance. (Calls that do nothing else the compiler may take out.)
    const void* address_of(std::uint32_t home) const noexcept { return &sets_[set_of(home)]; }

    // Forgets the name.
    Ghost take(std::uint32_t home, std::uint32_t name, std::uint64_t now) noexcept {
        Set& set = sets_[set_of(home)];
        const std::uint32_t tag = tag_of(name);
        std::uint32_t found = 0;
        for (std::size_t place = 0; place < kPlaces; ++place) {
            found |= std::uint32_t{(set[place] >> kTagShift) == tag} << place;
        }
        if (found == 0) {
            return {};
        }
        return read(std::exchange(set[static_cast<std::size_t>(std::countr_zero(found))], 0), now);
    }

    // The ghost that made way.
    Ghost add(std::uint32_t home, std::uint32_t name, std::size_t kind, std::uint16_t epoch,
              std::uint64_t now) noexcept {
        Set& set = sets_[set_of(home)];
        const std::uint32_t last = set.back();
        std::copy_backward(set.begin(), set.end() - 1, set.end());
        set.front() =
            (tag_of(name) << kTagShift) | (static_cast<std::uint32_t>(kind) << kEpochBits) | (epoch & kEpochMask);
        return last == 0 ? Ghost{} : read(last, now);
    }

private:
    static constexpr std::size_t kPlaces = 16;
    static constexpr std::uint32_t kEpochBits = 12;
    static constexpr std::uint32_t kEpochMask = (1U << kEpochBits) - 1;
    static constexpr std::uint32_t kTagShift = kEpochBits + 5;

    struct alignas(64) Set : std::array<std::uint32_t, kPlaces> {};

    std::size_t set_of(std::uint32_t home) const noexcept {
        const std::size_t power = std::bit_ceil(set_count_);
        const std::size_t set = home & (power - 1);
        return set < set_count_ ? set : set - power / 2;
    }
    static std::uint32_t tag_of(std::uint32_t name) noexcept { return (name >> 17) | 1; }
    static std::uint32_t age_of(std::uint32_t place, std::uint64_t now) noexcept {
        return (static_cast<std::uint32_t>(now) - place) & kEpochMask;
    }
    static Ghost read(std::uint32_t place, std::uint64_t now) noexcept {
        return {(place >> kEpochBits) % 32, static_cast<std::uint16_t>(now - age_of(place, now)), true};
    }

    std::size_t set_count_ = 1;
    ChunkedArray<Set> sets_;
};

}  // namespace kvo
