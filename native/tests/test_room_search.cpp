#include "arena/room_search.hpp"

#include <algorithm>
#include <random>

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
