// The frame of a coded record: what stands before its chunks and in them, as docs/format.md lists it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/codec_paths.hpp"

namespace kvo {

inline constexpr std::uint8_t kCodecVersion = 1;
inline constexpr std::size_t kChunkUnits = 65536;  // or as many whole strips as fit

struct CodedHead {
    std::uint8_t version = kCodecVersion;
    UnitKind kind = UnitKind::word;
    std::uint8_t column_groups = 0;  // of 32 columns; none: nothing is lowered
    std::uint8_t zero = 0;
    std::uint32_t reserved = 0;
    std::uint64_t length = 0;  // of the record

    std::size_t columns() const noexcept { return std::size_t{column_groups} * kLanes; }
};
static_assert(sizeof(CodedHead) == 16);

// Before each chunk: how many bytes follow, and in the highest bit whether they are the record's own.
inline constexpr std::uint32_t kIsPlain = std::uint32_t{1} << 31;
inline constexpr std::size_t kChunkHeadBytes = sizeof(std::uint32_t);
inline constexpr std::size_t kStateBytes = sizeof(LaneStates);

// A strip has 64 rows of a chunk's columns, the last one of a chunk maybe fewer.
constexpr std::size_t strip_units(std::size_t columns) { return columns * kStripRows; }

constexpr std::size_t chunk_units(std::size_t columns) {
    return columns == 0 ? kChunkUnits : kChunkUnits / strip_units(columns) * strip_units(columns);
}

// Heights of a strip: a lowest one and half a byte more for each column, or, of pairs, a byte each.
constexpr std::size_t height_bytes(UnitKind kind, std::size_t columns) {
    return columns == 0 ? 0 : kind == UnitKind::pair ? columns : 1 + columns / 2;
}

}  // namespace kvo
