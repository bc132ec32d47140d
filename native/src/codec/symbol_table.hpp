// The frequency of each symbol in a chunk, in parts of 2048, and the entropy coder's tables made from it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace kvo {

inline constexpr unsigned kTableBits = 11;
inline constexpr std::uint32_t kTableParts = 1U << kTableBits;
inline constexpr std::size_t kMaxTableBytes = 2 + 2 * 256;

// Parts of each symbol; their sum is 2048, and none has all of them.
using SymbolParts = std::array<std::uint16_t, 256>;

// One in each place of 2048: symbol (8 bits), parts (12), distance from the symbol's first place (12).
struct DecodeTable {
    alignas(64) std::array<std::uint32_t, kTableParts> entries;
};

// For each symbol: a factor that divides a state by the symbol's parts (32 bits), bias (12), parts (12) and shift (8).
struct EncodeTable {
    alignas(64) std::array<std::uint64_t, 256> rules;
};

SymbolParts count_parts(std::span<const std::uint8_t> symbols);
EncodeTable make_encode_table(const SymbolParts& parts);
void make_decode_table(const SymbolParts& parts, DecodeTable& table) noexcept;

// Writes to memory that has kMaxTableBytes. Returns how many bytes it wrote.
std::size_t write_parts(const SymbolParts& parts, std::uint8_t* target);

// Reads the parts at the start of `bytes`, and removes them from it. Returns nothing if there is no table.
std::optional<SymbolParts> read_parts(std::span<const std::uint8_t>& bytes) noexcept;

}  // namespace kvo
