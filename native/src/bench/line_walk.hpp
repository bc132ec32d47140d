// The limit that the index is measured against: two cache lines for each hash, the second named in the first.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <random>
#include <span>

#include "arena/segment.hpp"
#include "bench/cache_load.hpp"
#include "index/lookup.hpp"

namespace kvo {

// Lines in memory of the same kind as an index's. One thread at a time.
class LineWalk {
public:
    // Makes as many second lines as an index has entries, and as many first lines as it has buckets for them.
    // Code::invalid: an index cannot have so many.
    static Result<LineWalk> create(std::uint64_t entries);

    // Whether the second line is only read, or counted up as a lease does.
    enum class Second : std::uint8_t { read, count_up };

    // Batches of `hashes` random hashes, `lines` first lines and as many second ones each; all asked for in advance, in
    // the groups in which a look-up asks.
    Timing walk(std::size_t batches, std::size_t hashes, Second second);

    // How often second lines were counted up, and how many of them ever were.
    std::uint64_t count() const;
    std::uint64_t counted_lines() const;

private:
    struct alignas(64) First {
        std::array<std::uint32_t, 16> numbers;
    };
    struct alignas(64) Line {
        std::atomic<std::uint64_t> word;
    };

    LineWalk(Segment segment, std::uint64_t entries);
    template <Second second>
    std::uint64_t walk_batch(std::span<const std::uint8_t> hashes);

    Segment segment_;
    std::span<First> firsts_;
    std::span<Line> seconds_;
    std::mt19937_64 random_{2};
    std::uint64_t seen_ = 0;
};

}  // namespace kvo
