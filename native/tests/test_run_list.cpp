#include "copy/run_list.hpp"

#include <map>
#include <random>
#include <utility>
#include <vector>

#include "check.hpp"
#include "copy_contract.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

std::vector<CopyRun> list_runs(const RunList& list, std::uint64_t begin, std::uint64_t end) {
    std::vector<CopyRun> runs;
    list.visit_runs(begin, end, [&](const CopyRun& run) { runs.push_back(run); });
    return runs;
}

std::vector<SlotRun> list_slots(const RunList& list, std::uint64_t begin, std::uint64_t end) {
    std::vector<SlotRun> slots;
    list.visit_slots(begin, end, [&](const SlotRun& slot) { slots.push_back(slot); });
    return slots;
}

struct Move {
    std::uint64_t page, slot, length;
    bool operator==(const Move&) const = default;
};

std::vector<Move> list_moves(const CopyPlan& plan, const PageTable& pages) {
    const RunList list(plan, pages);
    std::vector<Move> moves;
    list.visit_runs(0, list.total_bytes(),
                    [&](const CopyRun& run) { moves.push_back({run.page, run.slot, run.length}); });
    return moves;
}

// Blocks outermost, 100 bytes each, in two runs that touch.
PageTable touching() {
    return {.block_count = 10, .groups = {{.record_bytes = 100, .runs = {{1000, 100, 60, 0}, {1060, 100, 40, 60}}}}};
}

// Layers outermost.
PageTable layered() {
    return {.block_count = 10, .groups = {{.record_bytes = 100, .runs = {{1000, 60, 60, 0}, {3000, 40, 40, 60}}}}};
}

}  // namespace

TEST(moves_are_the_fewest_and_in_the_order_of_addresses) {
    struct Row {
        PageTable pages;
        bool has_digests;
        std::vector<CopyItem> items;
        std::vector<Move> moves;
    };
    const std::vector<Row> rows = {
        {touching(), false, {}, {}},
        {touching(), false, {{0, 2, 50}}, {{1200, 50, 100}}},
        // Neighbours whose slots follow each other are one move, in whatever order they were given.
        {touching(), false, {{0, 3, 150}, {0, 2, 50}}, {{1200, 50, 200}}},
        {touching(), false, {{0, 2, 150}, {0, 3, 50}}, {{1200, 150, 100}, {1300, 50, 100}}},
        {touching(), false, {{0, 2, 50}, {0, 4, 150}}, {{1200, 50, 100}, {1400, 150, 100}}},
        {touching(), false, {{0, 2, 50}, {0, 3, 151}}, {{1200, 50, 100}, {1300, 151, 100}}},
        // Each record has a digest of its own.
        {touching(), true, {{0, 3, 150}, {0, 2, 50}}, {{1200, 50, 100}, {1300, 150, 100}}},
        {layered(),
         false,
         {{0, 1, 150}, {0, 0, 50}},
         {{1000, 50, 60}, {3000, 110, 40}, {1060, 150, 60}, {3040, 210, 40}}},
    };
    for (const Row& row : rows) {
        CHECK(list_moves({CopyDirection::save, row.has_digests, row.items}, row.pages) == row.moves);
        CHECK(list_moves({CopyDirection::load, row.has_digests, row.items}, row.pages) == row.moves);
    }
}

// The device's memory of two allocations may have consecutive addresses, and no copy may cross from one to the other.
TEST(runs_of_two_allocations_stay_apart) {
    PageTable pages = touching();
    pages.groups[0].runs[1].allocation = 1;
    const std::vector<Move> apart = {{1200, 50, 60}, {1260, 110, 40}, {1300, 150, 60}, {1360, 210, 40}};
    CHECK(list_moves({CopyDirection::save, false, {{0, 2, 50}, {0, 3, 150}}}, pages) == apart);
    pages.groups[0].runs[0].allocation = 1;
    CHECK(list_moves({CopyDirection::save, false, {{0, 2, 50}, {0, 3, 150}}}, pages) ==
          std::vector<Move>({{1200, 50, 200}}));
    const PageTable beside{.block_count = 2,
                           .groups = {{.record_bytes = 10, .runs = {{100, 10, 10, 0, 7}}},
                                      {.record_bytes = 10, .runs = {{120, 10, 10, 0, 8}}}}};
    CHECK(list_moves({CopyDirection::save, false, {{0, 1, 50}, {1, 0, 60}}}, beside) ==
          std::vector<Move>({{110, 50, 10}, {120, 60, 10}}));
}

TEST(groups_are_sorted_together_and_empty_ones_have_nothing) {
    const PageTable pages{.block_count = 3,
                          .groups = {{.record_bytes = 10, .runs = {{500, 10, 10, 0}}},
                                     {.record_bytes = 0, .runs = {}},
                                     {.record_bytes = 10, .runs = {{100, 10, 10, 0}}}}};
    const CopyPlan plan{CopyDirection::save, false, {{0, 0, 80}, {1, 2, 7}, {2, 1, 30}, {1, 0, 9}, {2, 0, 20}}};
    CHECK(list_moves(plan, pages) == std::vector<Move>({{100, 20, 20}, {500, 80, 10}}));
    CHECK_EQUAL(RunList(plan, pages).total_bytes(), std::uint64_t{30});
    CHECK_EQUAL(RunList({CopyDirection::save, false, {{1, 0, 9}}}, pages).total_bytes(), std::uint64_t{0});
}

TEST(slots_that_follow_each_other_are_one) {
    const CopyPlan plan{CopyDirection::save, true, {{0, 5, 300}, {0, 1, 100}, {0, 2, 200}, {0, 7, 500}}};
    const PageTable pages = layered();
    const RunList list(plan, pages);
    const auto all = list_slots(list, 0, list.total_bytes());
    CHECK_EQUAL(all.size(), std::size_t{2});
    CHECK(all[0].slot == 100 && all[0].length == 300 && all[0].position == 0);
    CHECK(all[1].slot == 500 && all[1].length == 100 && all[1].position == 300);
    const auto part = list_slots(list, 150, 320);
    CHECK_EQUAL(part.size(), std::size_t{2});
    CHECK(part[0].slot == 250 && part[0].length == 150 && part[0].position == 150);
    CHECK(part[1].slot == 500 && part[1].length == 20 && part[1].position == 300);
}

// Every byte of every record exactly once, whatever the row is cut into, each under its own item and offset.
TEST(any_parts_of_the_row_make_the_whole) {
    std::mt19937_64 random(70);
    for (int round = 0; round < 150; ++round) {
        const PageTable pages = draw_layout(random).table;
        const CopyPlan plan = draw_plan(pages, 1, 4096, random);
        const RunList list(plan, pages);
        std::map<std::pair<std::uint32_t, std::uint64_t>, int> seen;
        const std::uint64_t part_bytes = 1 + random() % 9000;
        std::uint64_t row = 0;
        for (std::uint64_t begin = 0; begin < list.total_bytes();) {
            const std::uint64_t end =
                random() % 2 == 0 ? list.end_part(begin, part_bytes) : std::min(begin + part_bytes, list.total_bytes());
            CHECK(end > begin);
            CHECK(end <= std::min(begin + part_bytes, list.total_bytes()));
            std::uint64_t in_slots = begin;
            for (const SlotRun& slot : list_slots(list, begin, end)) {
                CHECK_EQUAL(slot.position, in_slots);
                in_slots += slot.length;
            }
            CHECK_EQUAL(in_slots, end);
            for (const CopyRun& run : list_runs(list, begin, end)) {
                CHECK_EQUAL(run.position, row);
                row += run.length;
                const CopyItem& item = plan.items[run.item];
                CHECK_EQUAL(run.slot, item.slot + run.record_offset);
                ++seen[{run.item, run.record_offset}];
            }
            CHECK_EQUAL(row, end);
            begin = end;
        }
        for (const auto& [place, count] : seen) {
            CHECK_EQUAL(count, 1);
        }
    }
}

TEST(parts_end_at_records_and_pages_where_they_can) {
    const PageTable pages{.block_count = 9, .groups = {{.record_bytes = 10'000, .runs = {{64, 10'000, 10'000, 0}}}}};
    CopyPlan plan{CopyDirection::save, false, {}};
    for (std::uint32_t block = 0; block < 3; ++block) {
        plan.items.push_back({0, block, 1 + 20'000 * block});
    }
    const RunList list(plan, pages);
    CHECK_EQUAL(list.end_part(0, 9'000), std::uint64_t{8'192});
    CHECK_EQUAL(list.end_part(8'192, 9'000), std::uint64_t{14'096});
    CHECK_EQUAL(list.end_part(0, 11'000), std::uint64_t{10'000});
    CHECK_EQUAL(list.end_part(8'192, 100), std::uint64_t{8'292});
    CHECK_EQUAL(list.end_part(0, 0), std::uint64_t{1});
    CHECK_EQUAL(list.end_part(29'999, 4'096), std::uint64_t{30'000});
    CHECK_EQUAL(list.end_part(0, ~std::uint64_t{0}), std::uint64_t{30'000});
    CHECK_EQUAL(list.end_part(30'000, 5), std::uint64_t{30'000});
}

TEST(runs_are_estimated_as_they_are_copied) {
    // 100 runs of 1 MiB, of which the beginning is counted; and blocks that touch on both sides, which are one run.
    const PageTable pages{.block_count = 100,
                          .groups = {{.record_bytes = 1 << 20, .runs = {{4096, 2 << 20, 1 << 20, 0}}},
                                     {.record_bytes = 4096, .runs = {{1 << 30, 4096, 4096, 0}}}}};
    CopyPlan apart;
    CopyPlan row;
    for (std::uint32_t block = 0; block < 100; ++block) {
        apart.items.push_back({0, block, (std::uint64_t{1} << 40) + block * (std::uint64_t{1} << 20)});
        row.items.push_back({1, block, (std::uint64_t{1} << 40) + block * 4096});
    }
    CHECK_EQUAL(RunList(apart, pages).estimate_runs(), 100u);
    CHECK_EQUAL(RunList(row, pages).estimate_runs(), 1u);
    CHECK_EQUAL(RunList(CopyPlan{}, pages).estimate_runs(), 0u);
}
