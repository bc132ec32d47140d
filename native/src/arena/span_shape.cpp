#include "arena/span_shape.hpp"

#include <algorithm>

namespace kvo {
namespace {

constexpr double kWasteAllowed = 0.015;

}  // namespace

SpanShape span_shape(std::uint64_t slot_bytes, std::uint64_t extent_bytes, std::uint64_t segment_bytes) noexcept {
    if (slot_bytes == 0 || slot_bytes > segment_bytes) {
        return {};
    }
    const std::uint64_t shortest = (slot_bytes + extent_bytes - 1) / extent_bytes;
    const std::uint64_t longest = std::max(shortest, segment_bytes / extent_bytes / 4);
    SpanShape best;
    double best_waste = 1;
    for (std::uint64_t extents = shortest; extents <= longest && best_waste > kWasteAllowed; ++extents) {
        const std::uint64_t span_bytes = extents * extent_bytes;
        const std::uint64_t slots = span_bytes / slot_bytes;
        const double waste = static_cast<double>(span_bytes - slots * slot_bytes) / static_cast<double>(span_bytes);
        if (waste < best_waste) {
            best = {static_cast<std::uint32_t>(extents), static_cast<std::uint32_t>(slots)};
            best_waste = waste;
        }
    }
    return best;
}

}  // namespace kvo
