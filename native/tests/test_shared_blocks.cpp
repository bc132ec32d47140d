#include "copy/shared_blocks.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

GroupPages make_group(const std::vector<PageRun>& runs) {
    GroupPages group{.record_bytes = 0, .runs = runs};
    for (PageRun& run : group.runs) {
        run.record_offset = group.record_bytes;
        group.record_bytes += run.length;
    }
    return group;
}

std::vector<std::uint32_t> list_shared(const PageTable& pages, std::uint32_t group, std::uint32_t other) {
    const SharedBlocks shared(pages);
    std::vector<std::uint32_t> blocks;
    for (std::uint32_t block = 0; block < pages.block_count; ++block) {
        CHECK_EQUAL(shared.is_shared(block, group, other), shared.is_shared(block, other, group));
        if (shared.is_shared(block, group, other)) {
            blocks.push_back(block);
        }
    }
    CHECK(shared.has_any() || blocks.empty());
    return blocks;
}

bool do_meet(const GroupPages& group, const GroupPages& other, std::uint64_t block) {
    return std::ranges::any_of(group.runs, [&](const PageRun& one) {
        return std::ranges::any_of(other.runs, [&](const PageRun& two) {
            const std::uint64_t left = one.base + block * one.stride;
            const std::uint64_t right = two.base + block * two.stride;
            return left < right + two.length && right < left + one.length;
        });
    });
}

}  // namespace

TEST(blocks_of_two_groups_are_shared_where_their_runs_meet) {
    struct Row {
        std::vector<PageRun> group, other;
        std::vector<std::uint32_t> blocks;
    };
    const std::vector<Row> rows = {
        {{}, {}, {}},
        {{{1000, 100, 100}}, {}, {}},
        // One pool: equal strides, so all or none.
        {{{1000, 100, 100}}, {{1000, 100, 60}}, {0, 1, 2, 3, 4}},
        {{{1000, 100, 50}}, {{1049, 100, 50}}, {0, 1, 2, 3, 4}},
        {{{1000, 100, 50}}, {{1050, 100, 50}}, {}},
        {{{1050, 100, 50}}, {{1000, 100, 50}}, {}},
        // Beside each other in rows of one stride: the extents overlap, the blocks do not.
        {{{1000, 100, 20}, {1040, 100, 20}}, {{1020, 100, 20}, {1060, 100, 20}}, {}},
        // Different strides meet where one overtakes the other.
        {{{1000, 100, 10}}, {{1200, 20, 10}}, {}},
        {{{1000, 100, 11}}, {{1231, 20, 10}}, {3}},
        {{{1231, 20, 10}}, {{1000, 100, 11}}, {3}},
        {{{1000, 10, 10}}, {{1000, 12, 10}}, {0, 1, 2, 3, 4}},
        {{{1000, 10, 10}}, {{1006, 12, 10}}, {0, 1}},
        // Several pairs of runs: each block that any of them shares.
        {{{1000, 100, 10}, {9000, 50, 5}}, {{1089, 20, 10}, {9160, 10, 5}}, {1, 4}},
    };
    for (const Row& row : rows) {
        const PageTable pages{.block_count = 5, .groups = {make_group(row.group), make_group(row.other)}};
        CHECK(list_shared(pages, 0, 1) == row.blocks);
        CHECK(list_shared(pages, 0, 0).empty());
    }
}

TEST(only_pairs_that_share_are_told) {
    const PageTable pages{.block_count = 2,
                          .groups = {make_group({{100, 8, 8}}), make_group({{500, 8, 8}}), make_group({{100, 8, 8}})}};
    CHECK(SharedBlocks(pages).has_any());
    CHECK(list_shared(pages, 0, 1).empty());
    CHECK(list_shared(pages, 1, 2).empty());
    CHECK_EQUAL(list_shared(pages, 0, 2).size(), std::size_t{2});
    CHECK(!SharedBlocks({.block_count = 2, .groups = {pages.groups[0], pages.groups[1]}}).has_any());
    CHECK(!SharedBlocks({}).has_any());
}

TEST(addresses_at_the_end_of_memory_do_not_overflow) {
    constexpr std::uint64_t kEnd = ~std::uint64_t{0};
    const PageTable pages{.block_count = 2,
                          .groups = {make_group({{kEnd - 15, 8, 8}}), make_group({{0, kEnd - 11, 8}})}};
    CHECK(list_shared(pages, 0, 1) == std::vector<std::uint32_t>({1}));
}

TEST(they_are_those_that_a_search_through_all_finds) {
    std::mt19937_64 random(74);
    std::size_t found = 0;
    std::size_t missed = 0;
    for (int round = 0; round < 3000; ++round) {
        PageTable pages{.block_count = 1 + random() % 30, .groups = {}};
        const std::uint64_t stride = random() % 40;
        for (int group = 0; group < 2; ++group) {
            std::vector<PageRun> runs(random() % 4);
            for (PageRun& run : runs) {
                run = {500 + random() % 400, random() % 2 == 0 ? stride : random() % 40, 1 + random() % 12};
            }
            pages.groups.push_back(make_group(runs));
        }
        const SharedBlocks shared(pages);
        for (std::uint32_t block = 0; block < pages.block_count; ++block) {
            const bool is_shared = do_meet(pages.groups[0], pages.groups[1], block);
            CHECK_EQUAL(shared.is_shared(block, 1, 0), is_shared);
            ++(is_shared ? found : missed);
        }
    }
    CHECK(found > 1000);
    CHECK(missed > 1000);
}
