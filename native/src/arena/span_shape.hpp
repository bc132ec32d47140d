// How extents are cut into slots of one size.
//
//     span:  | extent | extent | extent |        k extents in a row, in one segment, serving one record size
//            |slot|slot|slot|slot|slot|~|        n slots; what remains at the end is waste
#pragma once

#include <cstdint>

namespace kvo {

struct SpanShape {
    std::uint32_t extents = 0;  // 0: such a slot fits no segment
    std::uint32_t slots = 0;

    // Such a record can go nowhere but to another run of extents as long.
    constexpr bool is_one_record() const { return slots == 1; }
    bool operator==(const SpanShape&) const = default;
};

// A record's place: whole cache lines; from 16 KiB on whole disk sectors, where 512 bytes hardly matter.
constexpr std::uint64_t slot_bytes_for(std::uint64_t record_bytes) noexcept {
    const std::uint64_t unit = record_bytes < 16 * 1024 ? 64 : 512;
    return (record_bytes + unit - 1) / unit * unit;
}

// The shortest span that wastes little (1.5%), since a long one is harder to find room for. Where none up to a quarter
// of the segment does, the one that wastes least. `extent_bytes` must divide `segment_bytes`.
SpanShape span_shape(std::uint64_t slot_bytes, std::uint64_t extent_bytes, std::uint64_t segment_bytes) noexcept;

}  // namespace kvo
