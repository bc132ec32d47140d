// The inner loops of the codec, once portable and once for x86, and what they share. For the files of this folder only.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codec/record_codec.hpp"
#include "codec/symbol_table.hpp"

namespace kvo {

static_assert(std::endian::native == std::endian::little, "numbers are coded as they lie in memory");

// How a unit of a record is parted into a symbol, which is coded, and the rest, which is kept.
enum class UnitKind : std::uint8_t {
    word = 1,  // 16 bits: bfloat16's exponent, or float16's with the upper bits of its mantissa
    pair = 2,  // two numbers of 8 bits: of each the upper four bits of its exponent
    wide = 3,  // 32 bits: the exponent
};

constexpr std::size_t unit_bytes(UnitKind kind) { return kind == UnitKind::wide ? 4 : 2; }
constexpr std::size_t rest_bytes(UnitKind kind) { return unit_bytes(kind) - 1; }

inline constexpr std::size_t kLanes = 32;  // a group of units, each coded by a state of its own
inline constexpr std::size_t kStripRows = 64;
inline constexpr std::size_t kMaxColumns = 1024;
inline constexpr std::uint32_t kStateLow = 1U << 15;  // states are from here to 2^31

using LaneStates = std::array<std::uint32_t, kLanes>;

// The amount by which each column is lowered. Without columns nothing is lowered, and all heights are zero.
struct ColumnHeights {
    std::array<std::uint8_t, kMaxColumns> height{};
    std::size_t columns = 0;
};

// Where a reader of coded words is.
struct WordCursor {
    const std::uint8_t* at = nullptr;
    const std::uint8_t* end = nullptr;
};

// A chunk whose symbols are being read.
struct SymbolStream {
    DecodeTable table;
    WordCursor words;
    LaneStates states;
};

inline constexpr std::size_t kMaxStreams = 2;

struct CodecPath {
    std::string_view name;
    std::size_t streams = 1;  // that are decoded at once, at most kMaxStreams

    // Parts whole groups of units. Of wide units the upper bytes of the rest come before all lower ones.
    void (*split)(UnitKind kind, const std::uint8_t* source, std::size_t units, std::uint8_t* symbols,
                  std::uint8_t* rest);
    // The other way round, with the heights added, for units `first` and following of `all` whose rest begins at
    // `rest`.
    void (*join)(UnitKind kind, const std::uint8_t* symbols, const std::uint8_t* rest, std::size_t all,
                 std::size_t first, std::size_t units, const ColumnHeights& heights, std::size_t column,
                 std::uint8_t* target);
    // Finds the median, or nearly, of every column over whole rows.
    void (*measure)(UnitKind kind, const std::uint8_t* symbols, std::size_t rows, ColumnHeights& heights);
    void (*lower)(UnitKind kind, std::uint8_t* symbols, std::size_t units, const ColumnHeights& heights);
    // Codes the groups from the last to the first. Returns where the words begin; they end at `words_end`, before which
    // there must be room for one word per unit and 32 bytes.
    std::uint8_t* (*encode)(const EncodeTable& table, const std::uint8_t* symbols, std::size_t units,
                            LaneStates& states, std::uint8_t* words_end);
    // Decodes `units` units (whole groups) of each stream, of which there are at most CodecPath::streams, and writes
    // them one stream after the other to `symbols`. Returns false if a stream has too few words.
    bool (*decode)(std::span<SymbolStream* const> streams, std::uint8_t* symbols, std::size_t units) noexcept;
};

extern const CodecPath kPortableCodec;
#if defined(__x86_64__)
extern const CodecPath kAvx512Codec;
extern const CodecPath kAvx2Codec;
#endif

}  // namespace kvo
