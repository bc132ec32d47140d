// Which extents serve no span, as runs of neighbours. A run never crosses a segment's end.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "arena/slot.hpp"

namespace kvo {

class FreeRuns {
public:
    using ByPlace = std::map<ExtentNumber, std::uint32_t>;  // first extent, length

    // Where in the pool a span goes: long spans collect at one end and short ones at the other, so that a short one
    // rarely stands in a long one's way.
    enum class End : std::uint8_t { low, high };

    // Whether it lies a multiple of its length before its segment's end, where there is such a place.
    enum class Grid : std::uint8_t { none, own_length };

    explicit FreeRuns(std::uint32_t extents_per_segment) noexcept : extents_per_segment_(extents_per_segment) {}

    // From the shortest run that is long enough, so that long ones last.
    std::optional<ExtentNumber> take(std::uint32_t length, End end, Grid grid = Grid::none);

    // Exactly these extents; false if one of them is not free.
    bool take_at(ExtentNumber first, std::uint32_t length);

    // Extents that were taken, or are new. They join free neighbours.
    void give(ExtentNumber first, std::uint32_t length);

    std::uint32_t total() const noexcept { return total_; }
    std::uint32_t longest() const noexcept { return by_length_.empty() ? 0 : by_length_.rbegin()->first; }
    const ByPlace& by_place() const noexcept { return by_place_; }

private:
    std::optional<ExtentNumber> take_on_grid(std::uint32_t length, End end);
    std::optional<ExtentNumber> cell_in(ExtentNumber first, std::uint32_t run_length, std::uint32_t length,
                                        End end) const;
    void insert(ExtentNumber first, std::uint32_t length);
    ByPlace::iterator erase(ByPlace::iterator run);

    std::uint32_t extents_per_segment_;
    std::uint32_t total_ = 0;
    ByPlace by_place_;
    std::set<std::pair<std::uint32_t, ExtentNumber>> by_length_;
};

}  // namespace kvo
