#include "disk/victim.hpp"

#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

std::uint32_t choose(std::vector<Candidate> candidates) { return choose_victim(candidates)->segment; }

}  // namespace

TEST(without_candidates_there_is_no_victim) { CHECK(!choose_victim({})); }

TEST(of_equals_the_oldest_goes) {
    CHECK_EQUAL(choose({{1, 30, 100, 0}, {2, 10, 100, 0}, {3, 20, 100, 0}}), std::uint32_t{2});
    CHECK_EQUAL(choose({{7, 1, 100, 100}}), std::uint32_t{7});
}

TEST(what_is_dead_goes_before_what_lives) {
    CHECK_EQUAL(choose({{1, 1, 100, 0}, {2, 2, 10, 0}, {3, 3, 100, 0}, {4, 4, 100, 0}}), std::uint32_t{2});
}

TEST(hot_bytes_count_more_than_live_ones) {
    CHECK_EQUAL(choose({{1, 1, 100, 80}, {2, 2, 100, 0}, {3, 3, 100, 0}, {4, 4, 100, 0}}), std::uint32_t{2});
}

TEST(age_wears_heat_out) {
    // The same segment, long after: its few hot bytes are worth less than the room it takes.
    CHECK_EQUAL(choose({{1, 1, 100, 10}, {2, 50, 100, 0}, {3, 51, 100, 0}, {4, 52, 100, 0}}), std::uint32_t{1});
}

TEST(the_newer_half_is_left_alone) {
    CHECK_EQUAL(choose({{1, 1, 100, 100}, {2, 2, 100, 100}, {3, 3, 0, 0}, {4, 4, 0, 0}}), std::uint32_t{1});
}

TEST(moves_are_a_share_of_what_is_put) {
    MoveAllowance allowance(0.1, 50);
    CHECK(!allowance.take(1));
    allowance.add_put(100);
    CHECK(!allowance.take(11));
    CHECK(allowance.take(10));
    CHECK(!allowance.take(1));
    allowance.add_put(100000);  // up to the limit
    CHECK(!allowance.take(51));
    CHECK(allowance.take(50));
}
