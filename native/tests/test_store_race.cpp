#include "bench/store_race.hpp"

#include <algorithm>

#include "check.hpp"

using namespace kvo;

TEST(calls_are_counted_beside_a_writer) {
    auto made = CacheLoad::create({.entries = 10'000, .record_bytes = 4096, .policy = "lru", .threads = 1});
    CHECK(made.ok());
    CacheLoad& load = *made.value();
    load.store(20'000);
    const CacheStats before = load.stats();
    const RaceOutcome outcome = race_stores(load, 500, 64, [&] { return load.acquire_newer(64); });
    CHECK_EQUAL(outcome.calls, 500u);
    CHECK(!outcome.seconds.empty() && outcome.seconds.size() <= 500);
    CHECK(std::ranges::is_sorted(outcome.seconds));
    CHECK(outcome.seconds.front() > 0);
    CHECK(outcome.stored >= 1000);
    CHECK_EQUAL(load.stats().evicted, before.evicted + outcome.stored);
    CHECK_EQUAL(load.stats().leases, 0u);
}

TEST(calls_that_fall_short_are_left_out) {
    auto made = CacheLoad::create({.entries = 10'000, .record_bytes = 4096, .policy = "lru", .threads = 1});
    CHECK(made.ok());
    std::uint64_t calls = 0;
    const RaceOutcome outcome =
        race_stores(*made.value(), 10, 5, [&] { return Timing{double(10 - calls), calls++ % 2 == 0 ? 5u : 4u}; });
    CHECK_EQUAL(outcome.calls, 10u);
    CHECK(outcome.seconds == std::vector<double>({2, 4, 6, 8, 10}));
}
