// The codec's loops that a compiler turns into vector instructions by itself, for the portable path, and for what
// others leave over. For the files of this folder only.
#pragma once

#include <algorithm>
#include <cstring>

#include "codec/codec_paths.hpp"

namespace kvo::codec_loops {

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
