#include "arena/room_plan.hpp"

#include <algorithm>
#include <random>
#include <set>

#include "arena/slot_pool.hpp"
#include "check.hpp"

using namespace kvo;

namespace {

constexpr std::uint32_t kSegment = 64;
constexpr std::uint64_t kNoLimit = 1ULL << 40;

// The cheapest window by trying every place, or every cell.
std::uint64_t cheapest_by_trying(const SlotPool& pool, std::uint32_t extents, bool is_on_grid = false) {
    std::uint64_t cheapest = kNoLimit;
    const ExtentNumber end = pool.spans.segment_count() * kSegment;
    for (ExtentNumber first = 0; first < end; ++first) {
        if (first % kSegment + extents > kSegment || (is_on_grid && (kSegment - first % kSegment) % extents != 0)) {
            continue;
        }
        std::uint64_t bytes = 0;
        for (ExtentNumber at = first / kSegment * kSegment; at < first + extents; ++at) {
            if (!pool.spans.is_span(at) || at + pool.spans.size_of(at).shape.extents <= first) {
                continue;
            }
            const SizeClass& size = pool.spans.size_of(at);
            const bool is_stuck = size.shape.extents >= extents && size.holes < size.shape.slots;
            bytes += is_stuck ? kNoLimit : pool.spans.live_bytes_of(at);
        }
        cheapest = std::min(cheapest, bytes);
    }
    return cheapest;
}

// Checks a window's own figures.
void check_window(const SlotPool& pool, const Window& window) {
    CHECK(window.first % kSegment + window.extents <= kSegment);
    std::uint64_t bytes = 0;
    for (ExtentNumber at = window.first; at < window.first + window.extents; ++at) {
        bytes += pool.spans.is_span(at) ? pool.spans.live_bytes_of(at) : 0;
    }
    CHECK_EQUAL(window.live_bytes, bytes);
}

}  // namespace

TEST(the_cheapest_window_is_found) {
    std::mt19937_64 random(9);
    for (int round = 0; round < 300; ++round) {
        SlotPool pool(kSegment);
        pool.add_extents(kSegment);
        pool.add_extents(kSegment);
        const ClassNumber sizes[] = {
            pool.spans.add_class(100, 100, {1, 10}),
            pool.spans.add_class(320, 320, {3, 9}),
            pool.spans.add_class(700, 700, {8, 11}),
        };
        std::vector<Slot> slots;
        while (const auto slot = pool.allocate(sizes[random() % 3], 1)) {
            slots.push_back(*slot);
        }
        std::ranges::shuffle(slots, random);
        slots.resize(slots.size() * (random() % 80) / 100);
        for (const Slot slot : slots) {
            pool.release(slot);
        }
        for (const std::uint32_t extents : {2u, 3u, 5u, 8u, 24u, 64u}) {
            const auto windows = cheapest_windows(pool.spans, pool.runs, {extents, kSegment, kNoLimit - 1, 0});
            const std::uint64_t cheapest = cheapest_by_trying(pool, extents);
            CHECK_EQUAL(windows.empty(), cheapest >= kNoLimit);
            CHECK(windows.size() <= 32);
            CHECK(windows.empty() || windows.front().live_bytes == cheapest);
            CHECK(std::ranges::is_sorted(windows, {}, &Window::live_bytes));
            for (const Window& window : windows) {
                check_window(pool, window);
            }
            const auto cells = cheapest_windows(pool.spans, pool.runs, {extents, kSegment, kNoLimit - 1, 0, true});
            const std::uint64_t cheapest_cell = cheapest_by_trying(pool, extents, true);
            CHECK_EQUAL(cells.empty(), cheapest_cell >= kNoLimit);
            CHECK(cells.empty() || cells.front().live_bytes == cheapest_cell);
            for (const Window& window : cells) {
                check_window(pool, window);
                const std::uint32_t end = window.first % kSegment + window.extents;
                CHECK((kSegment - end) % extents == 0 && window.extents >= extents);
            }
            // The limit leaves the others as they are.
            const auto limited = cheapest_windows(pool.spans, pool.runs, {extents, kSegment, cheapest, 0});
            CHECK(std::ranges::all_of(limited, [&](const Window& window) { return window.live_bytes == cheapest; }));
        }
    }
}

TEST(what_is_being_drained_already_is_not_offered) {
    SlotPool pool(kSegment);
    pool.add_extents(kSegment);
    const ClassNumber number = pool.spans.add_class(100, 100, {1, 10});
    while (pool.allocate(number, 1)) {
    }
    for (ExtentNumber first = 0; first < kSegment; ++first) {
        pool.release({first, 3});
    }
    CHECK(!cheapest_windows(pool.spans, pool.runs, {16, kSegment, kNoLimit, 0}).empty());
    for (ExtentNumber first = 15; first < kSegment; first += 16) {
        pool.spans.begin_drain(first);
    }
    CHECK(cheapest_windows(pool.spans, pool.runs, {16, kSegment, kNoLimit, 0}).empty());
    CHECK(!cheapest_windows(pool.spans, pool.runs, {15, kSegment, kNoLimit, 0}).empty());
}

TEST(a_withdrawn_segment_has_no_window) {
    for (const bool is_on_grid : {false, true}) {
        SlotPool pool(kSegment);
        pool.add_extents(2 * kSegment);
        const RoomQuestion question{.extents = 8,
                                    .extents_per_segment = kSegment,
                                    .bytes_limit = kNoLimit,
                                    .bytes_enough = 0,
                                    .is_on_grid = is_on_grid};
        pool.withdraw(kSegment);
        for (const Window& window : cheapest_windows(pool.spans, pool.runs, question)) {
            CHECK(window.first + window.extents <= kSegment);
        }
        pool.withdraw(0);
        CHECK(cheapest_windows(pool.spans, pool.runs, question).empty());
    }
}

TEST(of_a_very_large_pool_a_part_is_enough) {
    constexpr std::uint32_t kLarge = 1024;
    SlotPool pool(kLarge);
    for (int i = 0; i < 1024; ++i) {
        pool.add_extents(kLarge);
    }
    const ClassNumber number = pool.spans.add_class(100, 128, {1, 2});
    while (pool.allocate(number, 1)) {
    }
    pool.release({700 * kLarge + 5, 0});
    const auto windows = cheapest_windows(pool.spans, pool.runs, {24, kLarge, kNoLimit, 0});
    CHECK_EQUAL(windows.size(), 32u);
    CHECK_EQUAL(windows.front().live_bytes, 47u * 128);  // in the emptiest segment
}

TEST(what_the_emptiest_part_of_a_very_large_pool_has_not_is_not_looked_for_elsewhere) {
    constexpr std::uint32_t kLarge = 1024;
    for (const std::uint32_t useless : {200u, 600u}) {
        SlotPool pool(kLarge);
        for (std::uint32_t i = 0; i < useless; ++i) {
            pool.add_extents(kLarge);
        }
        // Records as long as what is wanted leave 4 extents of each segment, which are too few.
        const ClassNumber same = pool.spans.add_class(5 << 20, 5 << 20, {5, 1});
        while (pool.allocate(same, 1)) {
        }
        for (std::uint32_t i = 0; i < 200; ++i) {
            pool.add_extents(kLarge);
        }
        const ClassNumber shorter = pool.spans.add_class(1 << 20, 1 << 20, {1, 1});
        while (pool.allocate(shorter, 1)) {
        }
        for (std::uint32_t segment = 0; segment < useless; ++segment) {
            pool.release({segment * kLarge, 0});
        }
        const auto windows = cheapest_windows(pool.spans, pool.runs, {5, kLarge, kNoLimit, 0});
        CHECK_EQUAL(windows.empty(), useless == 600);
    }
}

TEST(a_window_never_reaches_into_what_is_not_there_yet) {
    for (const bool is_on_grid : {false, true}) {
        SlotPool pool(kSegment);
        pool.add_extents(kSegment + 10);
        const ClassNumber number = pool.spans.add_class(100, 100, {1, 10});
        // Everything but the last extents serves a span with one record.
        for (ExtentNumber at = 0; at < kSegment + 6; ++at) {
            CHECK(pool.claim(number, {at, 0}, at) == Claim::granted);
        }
        for (const Window& window : cheapest_windows(pool.spans, pool.runs,
                                                     {.extents = 8,
                                                      .extents_per_segment = kSegment,
                                                      .bytes_limit = kNoLimit,
                                                      .bytes_enough = 0,
                                                      .is_on_grid = is_on_grid})) {
            CHECK(window.first + window.extents <= kSegment + 10);
            check_window(pool, window);
        }
    }
}

namespace {

constexpr std::uint64_t kExtentBytes = 1 << 20;

class PlanBench {
public:
    PlanBench() { pool.add_extents(kSegment); }

    ClassNumber add_class(std::uint32_t extents, std::uint32_t slots) {
        const std::uint64_t slot_bytes = extents * kExtentBytes / slots;
        return pool.spans.add_class(slot_bytes, slot_bytes, {extents, slots});
    }

    void fill(ClassNumber number) {
        while (pool.allocate(number, next_owner)) {
            ++next_owner;
        }
    }

    RoomPlan plan(ClassNumber number) {
        const std::function<bool(EntryNumber)> is_movable = [&](EntryNumber owner) { return !pinned.contains(owner); };
        return RoomPlanner(pool, kExtentBytes, is_movable).plan(number);
    }

    void finish(const RoomPlan& plan) {
        for (const Move& move : plan.moves) {
            CHECK_EQUAL(pool.spans.owner_at(move.from), move.owner);
            CHECK_EQUAL(pool.spans.owner_at(move.to), move.owner);
            pool.end_move(move.from, move.to, move.from);
        }
    }

    SlotPool pool{kSegment};
    std::set<EntryNumber> pinned;
    EntryNumber next_owner = 1;
};

}  // namespace

TEST(one_extent_comes_from_the_sparsest_span) {
    PlanBench bench;
    const ClassNumber full = bench.add_class(1, 8);
    const ClassNumber wanted = bench.add_class(1, 4);
    bench.fill(full);
    for (const Slot slot : {Slot{7, 0}, Slot{7, 3}, Slot{7, 5}, Slot{9, 1}, Slot{9, 2}}) {
        bench.pool.release(slot);
    }
    for (ExtentNumber first = 20; first < 31; ++first) {
        bench.pool.release({first, 7});
    }
    CHECK_EQUAL(bench.pool.spans.spare_extents(), 1u);  // 16 holes, of which 8 may stay
    const RoomPlan plan = bench.plan(wanted);
    CHECK_EQUAL(plan.moves.size(), 5u);
    CHECK_EQUAL(plan.bytes, 5 * kExtentBytes / 8);
    CHECK(std::ranges::all_of(plan.moves, [](const Move& move) { return move.from.span == 7; }));
    bench.finish(plan);
    CHECK_EQUAL(bench.pool.allocate(wanted, 1).value().span, 7u);
}

TEST(a_pinned_record_holds_its_span) {
    PlanBench bench;
    const ClassNumber full = bench.add_class(1, 8);
    const ClassNumber wanted = bench.add_class(1, 4);
    bench.fill(full);
    for (ExtentNumber first = 0; first < kSegment; ++first) {
        bench.pool.release({first, 0});
        if (first != 10) {
            bench.pinned.insert(bench.pool.spans.owner_at({first, 4}));
        }
    }
    // Only a few spans are asked, so it is refused though 10 could go.
    CHECK(bench.plan(wanted).moves.empty());
    CHECK_EQUAL(bench.pool.spans.size_class(full).holes, 64u);
    bench.pool.release({10, 1});  // now it is the sparsest
    const RoomPlan plan = bench.plan(wanted);
    CHECK_EQUAL(plan.moves.size(), 6u);
    CHECK_EQUAL(plan.moves.front().from.span, 10u);
}

TEST(a_window_is_emptied_into_holes_and_into_free_extents) {
    PlanBench bench;
    const ClassNumber small = bench.add_class(1, 4);
    const ClassNumber large = bench.add_class(8, 2);
    bench.fill(small);
    // 1 to 8 keep three records: 1 whole span and 8 have their extents' worth of holes elsewhere.
    for (ExtentNumber first = 1; first <= 8; ++first) {
        for (std::uint32_t index = 0; index < 4; ++index) {
            if (first % 3 != 0 || index == 0) {
                bench.pool.release({first, index});
            }
        }
    }
    // Free: 1, 2, 4, 5, 7, 8. Sparse: 3, 6 with three records each. Elsewhere free: 40, 50, one hole in 60.
    for (const ExtentNumber first : {40u, 50u}) {
        for (std::uint32_t index = 0; index < 4; ++index) {
            bench.pool.release({first, index});
        }
    }
    bench.pool.release({60, 2});
    CHECK(!bench.pool.allocate(large, 1));
    const RoomPlan plan = bench.plan(large);
    CHECK_EQUAL(plan.moves.size(), 6u);
    for (const Move& move : plan.moves) {
        CHECK(move.from.span == 3 || move.from.span == 6);
        CHECK(move.to.span == 40 || move.to.span == 50 || move.to.span == 60);
    }
    bench.finish(plan);
    CHECK_EQUAL(bench.pool.allocate(large, 1).value().span, 1u);
    CHECK_EQUAL(bench.pool.runs.total(), 0u);
}

TEST(free_extents_are_gathered_where_no_window_can_be_emptied) {
    PlanBench bench;
    const ClassNumber small = bench.add_class(1, 4);
    const ClassNumber middle = bench.add_class(2, 2);
    const ClassNumber large = bench.add_class(4, 2);
    // They take turns, so every window of four holds a middle one, and there is no other place for it.
    while (bench.pool.allocate(middle, bench.next_owner++)) {
        bench.pool.allocate(middle, bench.next_owner++);
        for (int i = 0; i < 4; ++i) {
            bench.pool.allocate(small, bench.next_owner++);
        }
    }
    bench.fill(small);
    for (ExtentNumber first = 2; first < kSegment; first += 3) {
        bench.pool.release({first, 1});
    }
    CHECK_EQUAL(bench.pool.runs.total(), 0u);
    CHECK_EQUAL(bench.pool.spans.spare_extents(), 5u);
    const RoomPlan plan = bench.plan(large);
    CHECK_EQUAL(plan.moves.size(), 12u);
    bench.finish(plan);
    CHECK_EQUAL(bench.pool.runs.total(), 4u);
    CHECK(bench.plan(large).moves.empty());

    bench.pool.release({0, 0});
    bench.pool.release({0, 1});
    bench.finish(bench.plan(large));
    CHECK(bench.pool.allocate(large, 1).has_value());
}

TEST(where_records_in_use_stand_in_every_cell_room_is_made_beside_the_grid) {
    PlanBench bench;
    const ClassNumber small = bench.add_class(1, 4);
    const ClassNumber large = bench.add_class(24, 1);
    bench.fill(small);
    // The cells are 16 to 39 and 40 to 63.
    bench.pinned.insert(bench.pool.spans.owner_at({30, 0}));
    bench.pinned.insert(bench.pool.spans.owner_at({50, 0}));
    for (ExtentNumber first = 0; first < kSegment; ++first) {
        bench.pool.release({first, 1});
        bench.pool.release({first, 2});
    }
    const RoomPlan plan = bench.plan(large);
    CHECK(!plan.moves.empty());
    bench.finish(plan);
    CHECK(bench.pool.allocate(large, bench.next_owner).has_value());
}

TEST(a_refusal_changes_nothing) {
    PlanBench bench;
    const ClassNumber single = bench.add_class(1, 1);
    const ClassNumber middle = bench.add_class(3, 2);
    const ClassNumber large = bench.add_class(16, 1);
    while (bench.pool.allocate(middle, bench.next_owner++) && bench.pool.allocate(middle, bench.next_owner++) &&
           bench.pool.allocate(single, bench.next_owner++)) {
    }
    // As many free extents as a window's middle spans need, each on its own: the planner counts them and then fails.
    for (ExtentNumber first = 3; first < kSegment; first += 4) {
        bench.pool.release({first, 0});
    }
    const FreeRuns::ByPlace before = bench.pool.runs.by_place();
    CHECK_EQUAL(bench.pool.runs.total(), 16u);
    CHECK(bench.plan(large).moves.empty());
    CHECK(bench.pool.runs.by_place() == before);
    CHECK_EQUAL(bench.pool.spans.size_class(middle).holes, 0u);
    CHECK_EQUAL(bench.pool.spans.size_class(middle).spans, 16u);
    for (ExtentNumber first = 0; first < kSegment; ++first) {
        CHECK(!bench.pool.spans.is_span(first) || bench.pool.spans.is_idle(first));
    }

    // With holes for all of one window's records there is a way, unless every window holds a pinned one.
    for (ExtentNumber first = 0; first < kSegment; first += 4) {
        bench.pool.release({first, 1});
    }
    bench.pinned = {};
    for (ExtentNumber first = 0; first < kSegment; first += 4) {
        bench.pinned.insert(bench.pool.spans.owner_at({first, 0}));
    }
    CHECK(bench.plan(large).moves.empty());
    CHECK_EQUAL(bench.pool.spans.size_class(middle).holes, 16u);
    CHECK(bench.pool.runs.by_place() == before);
    bench.pinned.clear();
    bench.finish(bench.plan(large));
    CHECK(bench.pool.allocate(large, 1).has_value());
}
