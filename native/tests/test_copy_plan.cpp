#include "copy/copy_plan.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

Status check(const CopyPlan& plan, const PageTable& pages) { return check_plan(plan, pages, SharedBlocks(pages)); }

constexpr std::uint64_t kEnd = ~std::uint64_t{0};

PageTable two_groups() {
    return {
        .block_count = 4,
        .groups = {{.record_bytes = 12, .runs = {{1000, 8, 8, 0}, {2000, 4, 4, 8}}}, {.record_bytes = 0, .runs = {}}}};
}

}  // namespace

TEST(right_pages_are_taken) {
    CHECK(check_pages({}).ok());
    CHECK(check_pages(two_groups()).ok());
    CHECK(check_pages({.block_count = 2, .groups = {{.record_bytes = 4, .runs = {{kEnd - 7, 4, 4, 0}}}}}).ok());
    // The stride of a single block has no meaning.
    CHECK(check_pages({.block_count = 1, .groups = {{.record_bytes = 4, .runs = {{64, 0, 4, 0}}}}}).ok());
}

TEST(wrong_pages_are_named) {
    struct Row {
        std::uint64_t block_count;
        GroupPages group;
        const char* words;
    };
    const std::vector<Row> rows = {
        {1, {8, {{0, 8, 8, 0}, {8, 8, 0, 8}}}, "group 0, run 1 has no bytes"},
        {1, {8, {{0, 8, 8, 1}}}, "group 0, run 0 begins at byte 1"},
        {1, {16, {{0, 8, 8, 0}, {8, 8, 8, 9}}}, "begins at byte 9 of the record, the runs before it end at 8"},
        {1, {16, {{0, 8, 8, 0}, {8, 8, 8, 7}}}, "begins at byte 7"},
        {1, {9, {{0, 8, 8, 0}}}, "its runs have 8 bytes, its record 9"},
        {1, {1, {}}, "its runs have 0 bytes, its record 1"},
        {2, {4, {{kEnd - 6, 4, 4, 0}}}, "group 0, run 0: block 1 lies beyond all addresses"},
        {3, {4, {{0, std::uint64_t{1} << 63, 4, 0}}}, "block 2 lies beyond"},
        {2, {8, {{0, 7, 8, 0}}}, "group 0, run 0: its blocks have 8 bytes and are 7 bytes apart"},
        {2, {8, {{0, 0, 8, 0}}}, "are 0 bytes apart"},
        {1, {kEnd, {{0, 8, kEnd, 0}}}, "not be longer than 2**63"},
    };
    for (const Row& row : rows) {
        const Status status = check_pages({.block_count = row.block_count, .groups = {row.group}});
        CHECK(status.code() == Code::invalid);
        CHECK(status.message().find(row.words) != std::string::npos);
    }
}

TEST(plans_are_checked_against_the_pages) {
    struct Row {
        CopyDirection direction;
        std::vector<CopyItem> items;
        const char* words;  // empty: it is right
    };
    constexpr auto kSave = CopyDirection::save;
    constexpr auto kLoad = CopyDirection::load;
    const std::vector<Row> rows = {
        {kSave, {}, ""},
        {kSave, {{0, 3, 64}, {1, 0, 64}}, ""},
        {kSave, {{0, 3, 64}, {0, 3, 128}}, ""},
        {kSave, {{0, 0, kEnd - 12}}, ""},
        {kSave, {{1, 0, 0}}, ""},  // a record of no bytes is nowhere
        {kLoad, {{0, 3, 64}, {0, 2, 64}, {1, 3, 64}}, ""},
        {kSave, {{2, 0, 64}}, "group 2 is not one of the 2 registered"},
        {kSave, {{0, 4, 64}}, "block 4 of group 0 is not one of the 4"},
        {kSave, {{0, 0, 64}, {0, 1, 0}}, "block 1 of group 0: its slot is at no possible address (0)"},
        {kSave, {{0, 0, kEnd - 11}}, "no possible address"},
        {kLoad, {{0, 3, 64}, {0, 1, 64}, {0, 3, 128}}, "block 3 of group 0 is loaded twice"},
        {kLoad, {{1, 3, 64}, {1, 3, 64}}, "block 3 of group 1 is loaded twice"},
    };
    for (const Row& row : rows) {
        const Status status = check({row.direction, false, row.items}, two_groups());
        CHECK_EQUAL(status.ok(), std::string(row.words).empty());
        CHECK(status.message().find(row.words) != std::string::npos);
    }
}

// Groups 0 and 1 lie on each other, 2 lies elsewhere, 3 meets group 2 in block 3 alone.
TEST(a_load_writes_no_byte_twice) {
    const PageTable pages{.block_count = 8,
                          .groups = {{.record_bytes = 8, .runs = {{1000, 8, 8, 0}}},
                                     {.record_bytes = 4, .runs = {{1004, 8, 4, 0}}},
                                     {.record_bytes = 8, .runs = {{2000, 8, 8, 0}}},
                                     {.record_bytes = 8, .runs = {{1964, 20, 8, 0}}}}};
    struct Row {
        std::vector<CopyItem> items;
        const char* words;  // empty: it is right
    };
    const std::vector<Row> rows = {
        {{{0, 3, 64}, {1, 4, 64}, {2, 3, 64}, {2, 4, 64}}, ""},
        {{{1, 4, 64}, {0, 2, 64}, {0, 3, 64}, {1, 1, 64}, {2, 1, 64}}, ""},
        {{{0, 3, 64}, {1, 3, 64}}, "block 3 of group 1 shares bytes with that of group 0"},
        {{{1, 3, 64}, {2, 3, 64}, {0, 1, 64}, {0, 3, 64}}, "block 3 of group 1 shares bytes with that of group 0"},
        {{{2, 2, 64}, {3, 2, 64}, {2, 5, 64}, {3, 5, 64}}, ""},
        {{{3, 3, 64}, {0, 3, 64}, {2, 3, 64}}, "block 3 of group 3 shares bytes with that of group 2"},
    };
    for (const Row& row : rows) {
        const Status status = check({CopyDirection::load, false, row.items}, pages);
        CHECK_EQUAL(status.ok(), std::string(row.words).empty());
        CHECK(status.message().find(row.words) != std::string::npos);
        // A save may read a byte twice.
        CHECK(check({CopyDirection::save, false, row.items}, pages).ok());
    }
}

TEST(the_bytes_of_a_plan_can_be_counted) {
    const std::uint64_t huge = std::uint64_t{1} << 62;
    const PageTable pages{.block_count = 1, .groups = {{.record_bytes = huge, .runs = {{1, 0, huge, 0}}}}};
    const CopyItem item{0, 0, 1};
    CHECK(check({CopyDirection::save, false, {item, item}}, pages).ok());
    CHECK(!check({CopyDirection::save, false, {item, item, item}}, pages).ok());
}

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
