// Names for places in the pool; no addresses, so they may be stored and sent.
#pragma once

#include <cstdint>

namespace kvo {

using ExtentNumber = std::uint32_t;  // counted over all segments
using ClassNumber = std::uint16_t;   // of a record size

// One record's place: a span, named by its first extent, and the position in it.
struct Slot {
    ExtentNumber span = 0;
    std::uint32_t index = 0;

    bool operator==(const Slot&) const = default;
};

constexpr std::uint64_t pack_slot(Slot slot) noexcept { return std::uint64_t{slot.span} << 32 | slot.index; }
constexpr Slot unpack_slot(std::uint64_t packed) noexcept {
    return {static_cast<std::uint32_t>(packed >> 32), static_cast<std::uint32_t>(packed)};
}

// Where a slot's bytes begin, counted over all segments as if they lay one behind the other.
constexpr std::uint64_t slot_address(Slot slot, std::uint64_t extent_bytes, std::uint64_t slot_bytes) noexcept {
    return slot.span * extent_bytes + slot.index * slot_bytes;
}

// The same within its segment.
struct SlotPlace {
    std::uint32_t segment = 0;
    std::uint64_t offset_bytes = 0;

    bool operator==(const SlotPlace&) const = default;
};

}  // namespace kvo
