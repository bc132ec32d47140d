#include "arena/free_runs.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"

using namespace kvo;
using End = FreeRuns::End;

namespace {

constexpr std::uint32_t kSegment = 16;

FreeRuns make_runs(std::uint32_t segments) {
    FreeRuns runs(kSegment);
    for (std::uint32_t i = 0; i < segments; ++i) {
        runs.give(i * kSegment, kSegment);
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
    std::vector<bool> is_free(4 * kSegment, true);
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
                    const std::uint32_t behind = kSegment - run.first % kSegment;
                    return behind / length * length >= behind - run.second + length;
                });
                first = runs.take(length, End::low, FreeRuns::Grid::own_length);
                CHECK(first ? !has_cell || (kSegment - *first % kSegment) % length == 0 : runs.longest() < length);
                break;
            }
            case 1: {
                bool is_possible = place % kSegment + length <= kSegment;
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
            const bool begins = is_free[at] && (at % kSegment == 0 || !is_free[at - 1]);
            if (begins) {
                std::uint32_t end = at;
                while (end < is_free.size() && is_free[end] && (end == at || end % kSegment != 0)) {
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
