#include "codec/symbol_table.hpp"

#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

SymbolParts parts_of(const std::vector<std::uint8_t>& symbols) {
    const SymbolParts parts = count_parts(symbols);
    CHECK_EQUAL(std::accumulate(parts.begin(), parts.end(), 0U), kTableParts);
    for (const std::uint8_t symbol : symbols) {
        CHECK(parts[symbol] > 0 && parts[symbol] < kTableParts);
    }
    return parts;
}

std::vector<std::uint8_t> made_symbols(std::size_t count, unsigned spread, std::mt19937_64& random) {
    std::vector<std::uint8_t> symbols(count);
    std::geometric_distribution<unsigned> often(1.0 / spread);
    for (std::uint8_t& symbol : symbols) {
        symbol = static_cast<std::uint8_t>(often(random));
    }
    return symbols;
}

}  // namespace

TEST(all_symbols_that_there_are_have_parts) {
    std::mt19937_64 random(1);
    parts_of({});
    parts_of({0});
    parts_of({255, 255, 255});
    for (const std::size_t count : {2, 33, 1000, 65536}) {
        for (const unsigned spread : {2, 10, 100, 5000}) {
            parts_of(made_symbols(count, spread, random));
        }
    }
    std::vector<std::uint8_t> all(256 * 9);
    std::iota(all.begin(), all.end(), std::uint8_t{0});
    parts_of(all);
}

TEST(a_table_that_is_read_is_the_one_that_was_written) {
    std::mt19937_64 random(2);
    for (const unsigned spread : {2, 10, 100}) {
        const SymbolParts parts = parts_of(made_symbols(5000, spread, random));
        std::vector<std::uint8_t> bytes(kMaxTableBytes + 3);
        const std::size_t length = write_parts(parts, bytes.data());
        std::span<const std::uint8_t> left(bytes);
        CHECK(read_parts(left) == parts);
        CHECK_EQUAL(left.size(), bytes.size() - length);
        for (std::size_t cut = 0; cut < length; ++cut) {
            left = std::span(bytes).first(cut);
            CHECK(!read_parts(left));
        }
    }
}

TEST(parts_that_are_not_the_whole_are_no_table) {
    const std::vector<std::uint8_t> tables[] = {{5, 4, 1},                        // none
                                                {5, 6, 1, 1},                     // too few
                                                {5, 5, 0x80 | 8, 0},              // one has all
                                                {5, 6, 0x80 | 7, 0xff, 2},        // too many
                                                {5, 6, 0xff, 0xff, 0xff, 0xff}};  // by far
    for (const std::vector<std::uint8_t>& table : tables) {
        std::span<const std::uint8_t> bytes(table);
        CHECK(!read_parts(bytes));
    }
}

TEST(every_place_of_a_table_leads_to_its_symbol) {
    std::mt19937_64 random(3);
    const SymbolParts parts = parts_of(made_symbols(5000, 20, random));
    DecodeTable table;
    make_decode_table(parts, table);
    std::array<std::uint32_t, 256> seen{};
    for (const std::uint32_t entry : table.entries) {
        CHECK_EQUAL(entry >> 8 & 0xfff, parts[entry & 0xff]);
        CHECK_EQUAL(entry >> 20, seen[entry & 0xff]++);
    }
}
