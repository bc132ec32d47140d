#include "disk/write_budget.hpp"

#include "check.hpp"

using namespace kvo;
using namespace std::chrono_literals;

TEST(without_a_bound_everything_is_allowed) {
    WriteBudget budget(0, Instant(), false);
    budget.charge(std::uint64_t{1} << 50);
    CHECK(budget.allows(std::uint64_t{1} << 50, Instant()));
}

TEST(a_new_folder_has_an_hour_and_one_that_was_there_nothing) {
    CHECK(WriteBudget(2400, Instant(), true).allows(100, Instant()));
    CHECK(!WriteBudget(2400, Instant(), true).allows(101, Instant()));
    CHECK(!WriteBudget(2400, Instant(), false).allows(1, Instant()));
}

TEST(no_day_sees_more_than_its_bytes) {
    WriteBudget budget(24 << 20, Instant(), true);
    std::uint64_t written = 0;
    for (Instant now; now < Instant() + 24h; now += 10s) {
        for (; budget.allows(1000, now); written += 1000) {
            budget.charge(1000);
        }
    }
    const std::uint64_t day = 24 << 20;
    CHECK(written <= day);
    CHECK(written > day / 100 * 95);
}

TEST(what_was_written_beyond_it_is_owed) {
    WriteBudget budget(2400, Instant(), true);
    budget.charge(200);
    CHECK(!budget.allows(1, Instant() + 62min));
    CHECK(budget.allows(1, Instant() + 64min));
}
