#include "copy/copy_plan.hpp"

#include <string>
#include <vector>

#include "check.hpp"
#include "copy/shared_blocks.hpp"

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
