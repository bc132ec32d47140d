// The inner loops of the codec, once portable and once for x86, and what they share: a coded record's form, and the
// plan by which a record is coded. For the files of this folder only.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
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

namespace kvo::codec_loops {

// The codec's loops that a compiler turns into vector instructions by itself, for the portable path, and for what
// others leave over. For the files of this folder only.

template <typename Number>
Number load(const std::uint8_t* source) noexcept {
    Number number{};
    std::memcpy(&number, source, sizeof number);
    return number;
}

template <typename Number>
void store(std::uint8_t* target, Number number) noexcept {
    std::memcpy(target, &number, sizeof number);
}

inline std::uint8_t exponent_of(std::uint16_t word) noexcept { return static_cast<std::uint8_t>(word >> 7); }
inline std::uint8_t rest_of(std::uint16_t word) noexcept {
    return static_cast<std::uint8_t>((word & 0x7f) | (word >> 8 & 0x80));
}
inline std::uint16_t word_of(std::uint8_t exponent, std::uint8_t rest) noexcept {
    return static_cast<std::uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}

inline void split(UnitKind kind, const std::uint8_t* source, std::size_t units, std::uint8_t* symbols,
                  std::uint8_t* rest) noexcept {
    for (std::size_t i = 0; i < units; ++i) {
        if (kind == UnitKind::word) {
            const auto word = load<std::uint16_t>(source + 2 * i);
            symbols[i] = exponent_of(word);
            rest[i] = rest_of(word);
        } else if (kind == UnitKind::pair) {
            const auto word = load<std::uint16_t>(source + 2 * i);
            const unsigned upper = word >> 3 & 0x0f0fU, lower = (word & 0x0707U) | (word >> 4 & 0x0808U);
            symbols[i] = static_cast<std::uint8_t>(upper | upper >> 4);
            rest[i] = static_cast<std::uint8_t>(lower | lower >> 4);
        } else {
            const auto word = load<std::uint16_t>(source + 4 * i + 2);
            symbols[i] = exponent_of(word);
            rest[i] = rest_of(word);
            store(rest + units + 2 * i, load<std::uint16_t>(source + 4 * i));
        }
    }
}

inline std::uint8_t raise(UnitKind kind, std::uint8_t symbol, std::uint8_t height) noexcept {
    if (kind == UnitKind::pair) {
        return static_cast<std::uint8_t>((((symbol & 0x0f) + (height & 0x0f)) & 0x0f) |
                                         ((symbol & 0xf0) + (height & 0xf0)));
    }
    return static_cast<std::uint8_t>(symbol + height);
}

inline void join(UnitKind kind, const std::uint8_t* symbols, const std::uint8_t* rest, std::size_t all,
                 std::size_t first, std::size_t units, const ColumnHeights& heights, std::size_t column,
                 std::uint8_t* target) noexcept {
    for (std::size_t i = 0; i < units; ++i) {
        std::uint8_t symbol = symbols[i];
        if (heights.columns > 0) {
            symbol = raise(kind, symbol, heights.height[column]);
            column = column + 1 == heights.columns ? 0 : column + 1;
        }
        const std::uint8_t lower = rest[first + i];
        if (kind == UnitKind::word) {
            store(target + 2 * i, word_of(symbol, lower));
        } else if (kind == UnitKind::pair) {
            const unsigned upper = (symbol | unsigned{symbol} << 4) & 0x0f0f;
            const unsigned spread = lower | unsigned{lower} << 4;
            store(target + 2 * i, static_cast<std::uint16_t>(upper << 3 | (spread & 0x0707) | (spread & 0x0808) << 4));
        } else {
            store(target + 4 * i, load<std::uint16_t>(rest + all + 2 * (first + i)));
            store(target + 4 * i + 2, word_of(symbol, lower));
        }
    }
}

// Measures the heights of columns `from` to `from + kLanes`.
inline void measure_lanes(UnitKind kind, const std::uint8_t* symbols, std::size_t rows, std::size_t from,
                          ColumnHeights& heights) noexcept {
    const unsigned parts = kind == UnitKind::pair ? 2 : 1, mask = kind == UnitKind::pair ? 0x0f : 0xff;
    const std::uint8_t centre = kind == UnitKind::pair ? 8 : 128;
    std::array<std::uint8_t, kLanes> result{};
    for (unsigned part = 0; part < parts; ++part) {
        const unsigned shift = 4 * part;
        std::array<std::uint16_t, kLanes> sums{}, above{};
        std::array<std::uint8_t, kLanes> mean{};
        for (std::size_t row = 0; row < rows; ++row) {
            const std::uint8_t* const own = symbols + row * heights.columns + from;
            for (std::size_t lane = 0; lane < kLanes; ++lane) {
                sums[lane] = static_cast<std::uint16_t>(sums[lane] + (own[lane] >> shift & mask));
            }
        }
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            mean[lane] = static_cast<std::uint8_t>((sums[lane] + rows / 2) / rows);
        }
        for (std::size_t row = 0; row < rows; ++row) {
            const std::uint8_t* const own = symbols + row * heights.columns + from;
            for (std::size_t lane = 0; lane < kLanes; ++lane) {
                above[lane] = static_cast<std::uint16_t>(above[lane] + ((own[lane] >> shift & mask) > mean[lane]));
            }
        }
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const unsigned median = mean[lane] + (2U * above[lane] > rows ? 1U : 0U);
            result[lane] = static_cast<std::uint8_t>(result[lane] | ((median - centre) & mask) << shift);
        }
    }
    std::ranges::copy(result, heights.height.begin() + static_cast<std::ptrdiff_t>(from));
}

inline void measure(UnitKind kind, const std::uint8_t* symbols, std::size_t rows, ColumnHeights& heights) noexcept {
    for (std::size_t from = 0; from < heights.columns; from += kLanes) {
        measure_lanes(kind, symbols, rows, from, heights);
    }
}

inline void lower(UnitKind kind, std::uint8_t* symbols, std::size_t units, const ColumnHeights& heights) noexcept {
    std::size_t column = 0;
    for (std::size_t at = 0; at < units; at += kLanes) {
        const std::uint8_t* const height = heights.height.data() + column;
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            if (kind == UnitKind::pair) {
                const std::uint8_t symbol = symbols[at + lane];
                symbols[at + lane] = static_cast<std::uint8_t>((((symbol & 0x0f) - (height[lane] & 0x0f)) & 0x0f) |
                                                               ((symbol & 0xf0) - (height[lane] & 0xf0)));
            } else {
                symbols[at + lane] = static_cast<std::uint8_t>(symbols[at + lane] - height[lane]);
            }
        }
        column = column + kLanes == heights.columns ? 0 : column + kLanes;
    }
}

inline std::uint8_t* encode(const EncodeTable& table, const std::uint8_t* symbols, std::size_t units,
                            LaneStates& states, std::uint8_t* words_end) noexcept {
    for (std::size_t i = units; i-- > 0;) {
        std::uint32_t& state = states[i % kLanes];
        const auto factor = static_cast<std::uint32_t>(table.rules[symbols[i]]);
        const auto rule = static_cast<std::uint32_t>(table.rules[symbols[i]] >> 32);
        const std::uint32_t parts = rule >> 12 & 0xfff;
        if (state >= parts << (31 - kTableBits)) {
            words_end -= 2;
            store(words_end, static_cast<std::uint16_t>(state));
            state >>= 16;
        }
        const auto quotient = static_cast<std::uint32_t>((std::uint64_t{state} * factor) >> 32 >> (rule >> 24));
        state += (rule & 0xfff) + quotient * (kTableParts - parts);
    }
    return words_end;
}

inline bool decode_stream(SymbolStream& stream, std::uint8_t* symbols, std::size_t units) noexcept {
    WordCursor& words = stream.words;
    for (std::size_t i = 0; i < units; ++i) {
        std::uint32_t& state = stream.states[i % kLanes];
        const std::uint32_t entry = stream.table.entries[state % kTableParts];
        symbols[i] = static_cast<std::uint8_t>(entry);
        state = (entry >> 8 & 0xfff) * (state >> kTableBits) + (entry >> 20);
        if (state < kStateLow) {
            if (words.end - words.at < 2) {
                return false;
            }
            state = state << 16 | load<std::uint16_t>(words.at);
            words.at += 2;
        }
    }
    return true;
}

inline bool decode(std::span<SymbolStream* const> streams, std::uint8_t* symbols, std::size_t units) noexcept {
    return std::ranges::all_of(streams, [&](SymbolStream* stream) {
        const bool is_whole = decode_stream(*stream, symbols, units);
        symbols += units;
        return is_whole;
    });
}

}  // namespace kvo::codec_loops

namespace kvo {

// The frame of a coded record: what stands before its chunks and in them, as docs/format.md lists it.

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

// Decides from samples of a record how to code it, and whether that is worth while.

struct CodePlan {
    UnitKind kind = UnitKind::word;
    std::size_t columns = 0;  // a multiple of 32 up to 1024; 0: no columns are alike
};

// Returns how to code the record, or nothing if coding is not expected to make it at least 5% shorter.
std::optional<CodePlan> plan_code(std::span<const std::uint8_t> record);

}  // namespace kvo
