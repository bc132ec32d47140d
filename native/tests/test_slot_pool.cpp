#include "arena/slot_pool.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"

using namespace kvo;
using End = FreeRuns::End;

namespace {

constexpr std::uint32_t kShortSegment = 16;

FreeRuns make_runs(std::uint32_t segments) {
    FreeRuns runs(kShortSegment);
    for (std::uint32_t i = 0; i < segments; ++i) {
        runs.give(i * kShortSegment, kShortSegment);
    }
    return runs;
}

}  // namespace

TEST(runs_end_with_their_segment) {
    FreeRuns runs = make_runs(3);
    CHECK_EQUAL(runs.total(), 48u);
    CHECK_EQUAL(runs.longest(), 16u);
    CHECK_EQUAL(runs.by_place().size(), 3u);
    CHECK(!runs.take(17, End::low));
    CHECK(!runs.take_at(8, 16));
}

TEST(the_shortest_run_that_fits_is_taken_from_the_wanted_end) {
    FreeRuns runs = make_runs(3);
    CHECK(runs.take_at(2, 1));
    CHECK(runs.take_at(6, 1));  // 0-1, 3-5, 7-15; 16-31; 32-47
    CHECK_EQUAL(runs.take(2, End::high).value(), 0u);
    CHECK_EQUAL(runs.take(2, End::low).value(), 3u);
    CHECK_EQUAL(runs.take(3, End::high).value(), 13u);
    CHECK_EQUAL(runs.take(1, End::low).value(), 5u);
    CHECK_EQUAL(runs.take(10, End::high).value(), 38u);
    CHECK_EQUAL(runs.take(10, End::low).value(), 16u);
    CHECK(!runs.take(7, End::low));
    CHECK_EQUAL(runs.total(), 18u);
}

TEST(taking_and_giving_at_random_matches_a_map_of_extents) {
    std::mt19937_64 random(5);
    FreeRuns runs = make_runs(4);
    std::vector<bool> is_free(4 * kShortSegment, true);
    std::vector<std::pair<ExtentNumber, std::uint32_t>> taken;
    for (int step = 0; step < 20000; ++step) {
        const auto length = static_cast<std::uint32_t>(1 + random() % 6);
        const auto place = static_cast<ExtentNumber>(random() % is_free.size());
        std::optional<ExtentNumber> first;
        switch (random() % 5) {
            case 0:
                first = runs.take(length, random() % 2 == 0 ? End::low : End::high);
                break;
            case 2: {
                const bool has_cell = std::ranges::any_of(runs.by_place(), [&](const auto& run) {
                    const std::uint32_t behind = kShortSegment - run.first % kShortSegment;
                    return behind / length * length >= behind - run.second + length;
                });
                first = runs.take(length, End::low, FreeRuns::Grid::own_length);
                CHECK(first ? !has_cell || (kShortSegment - *first % kShortSegment) % length == 0
                            : runs.longest() < length);
                break;
            }
            case 1: {
                bool is_possible = place % kShortSegment + length <= kShortSegment;
                for (std::uint32_t i = 0; is_possible && i < length; ++i) {
                    is_possible = is_free[place + i];
                }
                CHECK_EQUAL(runs.take_at(place, length), is_possible);
                first = is_possible ? std::optional(place) : std::nullopt;
                break;
            }
            default:
                if (!taken.empty()) {
                    std::swap(taken[random() % taken.size()], taken.back());
                    const auto [back, back_length] = taken.back();
                    taken.pop_back();
                    runs.give(back, back_length);
                    std::fill_n(is_free.begin() + back, back_length, true);
                }
        }
        if (first) {
            for (std::uint32_t i = 0; i < length; ++i) {
                CHECK(is_free[*first + i]);
                is_free[*first + i] = false;
            }
            taken.emplace_back(*first, length);
        }
        FreeRuns::ByPlace expected;
        std::uint32_t longest = 0;
        for (ExtentNumber at = 0; at < is_free.size(); ++at) {
            const bool begins = is_free[at] && (at % kShortSegment == 0 || !is_free[at - 1]);
            if (begins) {
                std::uint32_t end = at;
                while (end < is_free.size() && is_free[end] && (end == at || end % kShortSegment != 0)) {
                    ++end;
                }
                expected[at] = end - at;
                longest = std::max(longest, end - at);
            }
        }
        CHECK(runs.by_place() == expected);
        CHECK_EQUAL(runs.longest(), longest);
        CHECK_EQUAL(runs.total(), static_cast<std::uint32_t>(std::ranges::count(is_free, true)));
    }
}

namespace {

constexpr std::uint32_t kSegment = 64;

}  // namespace

TEST(spans_come_and_go_with_their_records) {
    SlotPool pool(kSegment);
    const ClassNumber number = pool.spans.add_class(64, 64, {3, 2});
    CHECK(!pool.allocate(number, 1));
    pool.add_extents(kSegment);
    const Slot first = pool.allocate(number, 1).value();
    const Slot second = pool.allocate(number, 2).value();
    const Slot third = pool.allocate(number, 3).value();
    CHECK(first == (Slot{0, 0}));
    CHECK(second == (Slot{0, 1}));
    CHECK(third == (Slot{3, 0}));
    CHECK_EQUAL(pool.runs.total(), kSegment - 6);
    pool.release(first);
    pool.release(third);
    CHECK_EQUAL(pool.runs.total(), kSegment - 3);
    pool.release(second);
    CHECK_EQUAL(pool.runs.longest(), kSegment);
}

TEST(long_spans_collect_at_the_other_end) {
    SlotPool pool(kSegment);
    pool.add_extents(kSegment);
    const ClassNumber small = pool.spans.add_class(64, 64, {1, 1});
    const ClassNumber large = pool.spans.add_class(128, 128, {24, 1});
    CHECK_EQUAL(pool.allocate(small, 1).value().span, 0u);
    CHECK_EQUAL(pool.allocate(large, 2).value().span, 40u);
    CHECK_EQUAL(pool.allocate(small, 3).value().span, 1u);
    CHECK_EQUAL(pool.allocate(large, 4).value().span, 16u);
    CHECK(!pool.allocate(large, 5));
}

TEST(claims_are_granted_where_they_fit) {
    SlotPool pool(kSegment);
    pool.add_extents(kSegment);
    pool.add_extents(kSegment);
    const ClassNumber two = pool.spans.add_class(64, 64, {2, 3});
    const ClassNumber three = pool.spans.add_class(128, 128, {3, 4});
    const struct {
        ClassNumber number;
        Slot slot;
        Claim answer;
    } table[] = {
        {two, {10, 1}, Claim::granted},     {two, {10, 1}, Claim::taken},
        {two, {10, 2}, Claim::granted},     {two, {10, 3}, Claim::misplaced},    // no such slot
        {three, {10, 0}, Claim::misplaced},                                      // another size is there
        {two, {11, 0}, Claim::misplaced},   {two, {9, 0}, Claim::misplaced},     // reaches into it
        {three, {12, 3}, Claim::granted},   {three, {62, 0}, Claim::misplaced},  // over the segment's end
        {two, {126, 0}, Claim::granted},    {two, {127, 0}, Claim::misplaced},   // over the pool's end
        {two, {128, 0}, Claim::misplaced},  {two, {0xffffffff, 0}, Claim::misplaced},
    };
    EntryNumber owner = 1;
    for (const auto& [number, slot, answer] : table) {
        CHECK(pool.claim(number, slot, owner) == answer);
        CHECK(answer != Claim::granted || pool.spans.owner_at(slot) == owner);
        ++owner;
    }
    CHECK_EQUAL(pool.runs.total(), 2 * kSegment - 7);
    CHECK(pool.allocate(two, 50).value() == (Slot{10, 0}));
}

TEST(a_move_ends_in_one_of_its_places) {
    for (const bool is_finished : {true, false}) {
        SlotPool pool(kSegment);
        pool.add_extents(kSegment);
        const ClassNumber number = pool.spans.add_class(64, 64, {1, 2});
        const Slot from = pool.allocate(number, 5).value();
        const Slot other = pool.allocate(number, 6).value();
        const Slot third = pool.allocate(number, 7).value();
        pool.release(other);
        pool.spans.begin_drain(from.span);
        const Slot to = pool.allocate(number, 5).value();
        CHECK_EQUAL(to.span, third.span);
        pool.begin_move(from, to);
        CHECK(!pool.spans.is_idle(from.span) && !pool.spans.is_idle(to.span));
        pool.end_move(from, to, is_finished ? from : to);
        CHECK(pool.spans.is_idle(to.span));
        CHECK_EQUAL(pool.spans.is_span(from.span), !is_finished);
        CHECK_EQUAL(pool.spans.owner_at(is_finished ? to : from), 5u);
        CHECK_EQUAL(pool.spans.owner_at(is_finished ? from : to), kNoEntry);
        CHECK_EQUAL(pool.runs.total(), is_finished ? kSegment - 1 : kSegment - 2);
    }
}

TEST(a_segment_may_come_in_parts) {
    SlotPool pool(kSegment);
    pool.add_extents(5);
    pool.add_extents(kSegment);
    CHECK_EQUAL(pool.spans.segment_count(), 2u);
    CHECK_EQUAL(pool.runs.total(), kSegment + 5);
    CHECK_EQUAL(pool.runs.longest(), kSegment);  // parts of one segment are one run, two segments are two
    CHECK(!pool.runs.take_at(kSegment + 5, 1));
    pool.add_extents(kSegment - 5);
    CHECK_EQUAL(pool.runs.by_place().size(), 2u);
    CHECK_EQUAL(pool.runs.total(), 2 * kSegment);
}
