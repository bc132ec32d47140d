#include "codec/symbol_table.hpp"

#include <algorithm>

namespace kvo {
namespace {

constexpr std::uint8_t kLong = 0x80;  // of the first byte of a number of two

std::array<std::uint32_t, 256> count_symbols(std::span<const std::uint8_t> symbols) {
    // Neighbours are often equal, and a counter cannot be added to twice at once.
    std::array<std::array<std::uint32_t, 256>, 4> counts{};
    std::size_t i = 0;
    for (; i + 8 <= symbols.size(); i += 8) {
        ++counts[0][symbols[i]];
        ++counts[1][symbols[i + 1]];
        ++counts[2][symbols[i + 2]];
        ++counts[3][symbols[i + 3]];
        ++counts[0][symbols[i + 4]];
        ++counts[1][symbols[i + 5]];
        ++counts[2][symbols[i + 6]];
        ++counts[3][symbols[i + 7]];
    }
    for (; i < symbols.size(); ++i) {
        ++counts[0][symbols[i]];
    }
    for (std::size_t symbol = 0; symbol < 256; ++symbol) {
        counts[0][symbol] += counts[1][symbol] + counts[2][symbol] + counts[3][symbol];
    }
    return counts[0];
}

constexpr std::uint64_t rule_of(std::uint64_t factor, std::uint32_t bias, std::uint32_t parts, std::uint32_t shift) {
    return factor | std::uint64_t{bias | parts << 12 | shift << 24} << 32;
}

}  // namespace

SymbolParts count_parts(std::span<const std::uint8_t> symbols) {
    const std::array<std::uint32_t, 256> counts = count_symbols(symbols);
    const std::uint64_t total = std::max<std::uint64_t>(symbols.size(), 1);
    SymbolParts parts{};
    std::int64_t left = kTableParts;
    for (std::size_t symbol = 0; symbol < 256; ++symbol) {
        if (counts[symbol] > 0) {
            const std::uint64_t rounded = (counts[symbol] * std::uint64_t{kTableParts} + total / 2) / total;
            parts[symbol] = static_cast<std::uint16_t>(std::clamp<std::uint64_t>(rounded, 1, kTableParts - 1));
            left -= parts[symbol];
        }
    }
    if (std::ranges::count_if(counts, [](std::uint32_t count) { return count > 0; }) < 2) {
        // No symbol may have all: its neighbour gets one that is never used.
        const auto only = static_cast<std::size_t>(std::ranges::max_element(counts) - counts.begin());
        parts[only] = kTableParts - 1;
        parts[only == 255 ? 254 : only + 1] = 1;
        return parts;
    }
    while (left != 0) {
        // Where it costs least: the largest.
        std::uint16_t& largest = *std::ranges::max_element(parts);
        const std::int64_t step = left > 0 ? std::min<std::int64_t>(left, kTableParts - 1 - largest)
                                           : std::max<std::int64_t>(left, -(largest / 4 + 1));
        largest = static_cast<std::uint16_t>(largest + step);
        left -= step;
    }
    return parts;
}

EncodeTable make_encode_table(const SymbolParts& parts) {
    EncodeTable table{};
    std::uint32_t start = 0;
    for (std::size_t symbol = 0; symbol < 256; ++symbol) {
        const std::uint32_t own = parts[symbol];
        if (own == 1) {
            table.rules[symbol] = rule_of(~0U, start + kTableParts - 1, own, 0);
        } else if (own > 1) {
            std::uint32_t bits = 0;
            while (own > 1U << bits) {
                ++bits;
            }
            const std::uint64_t factor = ((std::uint64_t{1} << (bits + 31)) + own - 1) / own;
            table.rules[symbol] = rule_of(factor, start, own, bits - 1);
        }
        start += own;
    }
    return table;
}

void make_decode_table(const SymbolParts& parts, DecodeTable& table) noexcept {
    std::size_t at = 0;
    for (std::uint32_t symbol = 0; symbol < 256; ++symbol) {
        const std::uint32_t own = parts[symbol];
        for (std::uint32_t i = 0; i < own; ++i) {
            table.entries[at++] = symbol | own << 8 | i << 20;
        }
    }
}

std::size_t write_parts(const SymbolParts& parts, std::uint8_t* target) {
    std::size_t first = 0, last = 255;
    while (parts[first] == 0) {
        ++first;
    }
    while (parts[last] == 0) {
        --last;
    }
    std::uint8_t* at = target;
    *at++ = static_cast<std::uint8_t>(first);
    *at++ = static_cast<std::uint8_t>(last);
    for (std::size_t symbol = first; symbol <= last; ++symbol) {
        if (parts[symbol] >= kLong) {
            *at++ = static_cast<std::uint8_t>(kLong | parts[symbol] >> 8);
        }
        *at++ = static_cast<std::uint8_t>(parts[symbol]);
    }
    return static_cast<std::size_t>(at - target);
}

std::optional<SymbolParts> read_parts(std::span<const std::uint8_t>& bytes) noexcept {
    if (bytes.size() < 2 || bytes[0] > bytes[1]) {
        return std::nullopt;
    }
    SymbolParts parts{};
    const std::size_t last = bytes[1];
    std::size_t at = 2;
    std::uint32_t sum = 0;
    for (std::size_t symbol = bytes[0]; symbol <= last; ++symbol) {
        if (at == bytes.size()) {
            return std::nullopt;
        }
        std::uint32_t own = bytes[at++];
        if (own >= kLong) {
            if (at == bytes.size()) {
                return std::nullopt;
            }
            own = (own & ~std::uint32_t{kLong}) << 8 | bytes[at++];
        }
        sum += own;
        if (own >= kTableParts) {
            return std::nullopt;
        }
        parts[symbol] = static_cast<std::uint16_t>(own);
    }
    if (sum != kTableParts) {
        return std::nullopt;
    }
    bytes = bytes.subspan(at);
    return parts;
}

}  // namespace kvo
