#include "bench/cache_load.hpp"

#include <algorithm>
#include <cstring>
#include <set>

#include "check.hpp"

using namespace kvo;

namespace {

std::unique_ptr<CacheLoad> make_load() {
    auto load = CacheLoad::create({.entries = 10'000, .record_bytes = 4096, .policy = "lru", .threads = 1});
    CHECK(load.ok());
    return std::move(load.value());
}

}  // namespace

TEST(made_hashes_are_many_and_the_same_every_time) {
    std::vector<std::uint8_t> hashes(2000 * kHashBytes);
    make_hashes(5, hashes);
    std::set<std::vector<std::uint8_t>> seen;
    for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
        std::vector<std::uint8_t> alone(kHashBytes);
        make_hashes(5 + at / kHashBytes, alone);
        CHECK(std::memcmp(alone.data(), hashes.data() + at, kHashBytes) == 0);
        CHECK(alone != std::vector<std::uint8_t>(kHashBytes));
        CHECK(seen.insert(alone).second);
    }
}

TEST(what_is_stored_is_found_and_acquired) {
    const auto load = make_load();
    CHECK_EQUAL(load->store(2500).done, 3000u);  // whole chains
    CHECK_EQUAL(load->stats().readable, 3000u);
    CHECK_EQUAL(load->look_up(3).done, 3000u);
    CHECK_EQUAL(load->acquire(5, CacheLoad::kChainBlocks).done, 5000u);
    CHECK_EQUAL(load->acquire(4, 64).done, 256u);
    CHECK_EQUAL(load->acquire_newer(64).done, 64u);
    const CacheStats stats = load->stats();
    CHECK_EQUAL(stats.hits, 10u);
    CHECK_EQUAL(stats.misses, 0u);
    CHECK_EQUAL(stats.leases, 0u);
}

TEST(full_memory_evicts_one_for_each) {
    const auto load = make_load();
    load->store(2 * 10'000);
    const CacheStats before = load->stats();
    CHECK(before.evicted != 0);
    CHECK_EQUAL(load->store(1000).done, 1000u);
    CHECK_EQUAL(load->stats().evicted, before.evicted + 1000);
    CHECK_EQUAL(load->stats().readable, before.readable);
    CHECK_EQUAL(load->look_up(1).done, 1000u);
}

TEST(nothing_is_found_in_an_empty_cache) {
    const auto load = make_load();
    CHECK_EQUAL(load->look_up(1).done, 0u);
    CHECK_EQUAL(load->acquire(1, 64).done, 0u);
}

TEST(an_unknown_policy_is_refused) {
    CHECK(CacheLoad::create({.entries = 100, .policy = "none such"}).fault().code() == Code::invalid);
}

TEST(a_pool_larger_than_the_machine_is_shared_and_taken_over) {
    LoadShape shape;
    shape.entries = 8'192;
    shape.record_bytes = std::uint64_t{64} << 20;
    shape.policy = "prefix";
    shape.segment_bytes = std::uint64_t{4} << 30;
    shape.is_sparse = true;
    shape.sessions = 5;
    shape.tenants = 4;
    auto created = CacheLoad::create(shape);
    CHECK(created.ok());
    CacheLoad& load = *created.value();
    CHECK_EQUAL(load.walk(1).done, 0u);  // nothing is there
    CHECK_EQUAL(load.store(10'000).done, 10'000u);
    CacheStats stats = load.stats();
    CHECK_EQUAL(stats.sessions, 5u);
    CHECK_EQUAL(stats.readable, 8'192u);
    CHECK_EQUAL(stats.tenants.size(), 4u);
    for (const TenantTable::Usage& tenant : stats.tenants) {
        CHECK(tenant.used_bytes != 0);
    }
    CHECK_EQUAL(load.acquire_missing(3, 256).done, 3u);
    CHECK_EQUAL(load.walk(2).done, 2'000u);
    const Result<Timing> adopted = load.adopt();
    CHECK(adopted.ok());
    CHECK_EQUAL(adopted.value().done, 8'192u);
    CHECK_EQUAL(load.store(1'000).done, 1'000u);
    CHECK_EQUAL(load.stats().readable, 8'192u);
}

TEST(a_cache_is_looked_at_step_by_step) {
    const auto steps = measure_growth({.entries = 50'000, .policy = "lru", .threads = 1}, 10'000);
    CHECK(steps.ok());
    CHECK_EQUAL(steps.value().size(), 5u);
    std::uint64_t entries = 0;
    for (const GrowthStep& step : steps.value()) {
        CHECK_EQUAL(step.entries, entries += 10'000);
        CHECK(step.index_bytes >= step.entries * 72);  // an entry and its digest alone
        CHECK(step.index_bytes < 16 << 20);
    }
    // The policy's list alone has 24 bytes an entry; sanitizers add more, and may have taken it from what they kept.
    CHECK(steps.value().back().private_bytes < std::uint64_t{1} << 30);
}

TEST(a_cache_that_cannot_be_made_says_why) {
    CHECK(measure_growth({.entries = 1000, .policy = "none such"}, 100).fault().code() == Code::invalid);
}

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
