// Which blocks have left the cache, why and when: so that a miss can say what would have kept its block.
//
// Sets of four, each in one cache line; the oldest of a set gives way. A block is told by 32 bits of its name besides
// those that choose its set, which is enough for an explanation and for nothing else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

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

}  // namespace kvo
