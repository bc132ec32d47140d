// Which blocks have left the cache, why and when: so that a miss can say what would have kept its block.
//
// Sets of four, each in one cache line; the oldest of a set gives way. A block is told by 32 bits of its name besides
// those that choose its set, which is enough for an explanation and for nothing else.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "index/layout.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {

enum class Leaving : std::uint8_t {
    evicted = 1,
    untrusted = 2,  // its bytes were wrong, or a caller said so
    cleared = 3,    // with all of its namespace
};

struct Departure {
    Leaving why = Leaving::evicted;
    std::uint32_t second = 0;         // by the clock of the caller that added it
    std::uint64_t evicted_bytes = 0;  // that had been evicted by then, in all
};

// The caller holds the writer's lock.
class Departures {
public:
    // Remembers about so many, of 16 bytes each, whose pages are taken at their first use; none where there is no
    // memory.
    explicit Departures(std::size_t limit);

    // Asks for the memory where adding this name begins.
    void prefetch(std::uint64_t name) const;
    void add(std::uint64_t name, const Departure& departure);
    // The last one of this name, if it is remembered.
    std::optional<Departure> find(std::uint64_t name) const;

private:
    struct Row {
        std::uint32_t tag = 0;
        std::uint32_t second = 0;
        std::uint64_t bytes_and_why = 0;  // 0: there is none
    };
    struct alignas(64) Set {
        std::array<Row, 4> rows;
    };

    AlignedMemory memory_;
    std::span<Set> sets_;  // a power of two, or none
};

// Blocks that cannot be found any more, kept until they are taken to be reported to others.

struct RemovedBlock {
    Space space = 0;
    HashWords hash{};
};

// Safe to call from any thread; a thread that adds holds the writer's lock.
class RemovedLog {
public:
    static constexpr std::size_t kLimit = std::size_t{1} << 20;

    // Beyond so many blocks, or without memory for them, those that were removed are only counted.
    explicit RemovedLog(std::size_t limit = kLimit) : limit_(limit) {}

    // Sets whether removed blocks are wanted. Blocks that are removed before they are wanted are not told.
    void watch(bool is_wanted);
    bool is_wanted() const { return is_wanted_.load(std::memory_order_acquire); }

    void add(RemovedBlock block);

    struct Taken {
        std::vector<RemovedBlock> blocks;
        std::uint64_t lost = 0;
        bool is_all = true;  // nothing is left
    };
    // The oldest, so many at most.
    Taken take(std::size_t count);

private:
    const std::size_t limit_;
    std::atomic<bool> is_wanted_ = false;
    std::mutex mutex_;  // guards what follows
    // Grows and shrinks a few at a time: a thread that adds holds up all other writers.
    std::deque<RemovedBlock> blocks_;
    std::uint64_t lost_ = 0;
};

}  // namespace kvo
