#include "cache/departures.hpp"

#include <random>

#include "cache_fixture.hpp"
#include "check.hpp"

using namespace kvo;

namespace {

// Like names of blocks: any bits.
std::uint64_t name_of(std::uint64_t number) {
    std::mt19937_64 random(number);
    return random();
}

}  // namespace

TEST(tells_what_it_was_told_last) {
    Departures departures(64);
    CHECK(!departures.find(name_of(1)));
    departures.add(name_of(1), {Leaving::evicted, 5, 4096});
    departures.add(name_of(2), {Leaving::cleared, 6, 0});
    departures.add(name_of(1), {Leaving::untrusted, 7, 8192});
    const auto found = departures.find(name_of(1));
    CHECK(found.has_value());
    CHECK(found->why == Leaving::untrusted);
    CHECK_EQUAL(found->second, 7U);
    CHECK_EQUAL(found->evicted_bytes, 8192U);
    CHECK(departures.find(name_of(2))->why == Leaving::cleared);
    CHECK(!departures.find(name_of(3)));
}

TEST(the_oldest_of_a_set_gives_way) {
    Departures departures(4);  // one set
    for (std::uint64_t number = 1; number <= 6; ++number) {
        departures.add(name_of(number), {Leaving::evicted, 0, number});
    }
    for (std::uint64_t number = 1; number <= 6; ++number) {
        CHECK_EQUAL(departures.find(name_of(number)).has_value(), number > 2);
    }
}

TEST(names_that_are_alike_in_most_bits_are_told_apart) {
    Departures departures(1 << 12);
    for (std::uint64_t number = 0; number < 1000; ++number) {
        departures.add(number << 40, {Leaving::evicted, static_cast<std::uint32_t>(number), number + 1});
    }
    std::size_t found = 0;
    for (std::uint64_t number = 0; number < 1000; ++number) {
        const auto one = departures.find(number << 40);
        if (one) {
            CHECK_EQUAL(one->second, static_cast<std::uint32_t>(number));
            ++found;
        }
    }
    CHECK(found > 900);
    CHECK(!departures.find(std::uint64_t{1000} << 40));
}

TEST(most_of_what_fits_is_remembered) {
    constexpr std::size_t kCount = 1 << 14;
    Departures departures(kCount);
    for (std::uint64_t number = 1; number <= kCount / 2; ++number) {
        departures.add(name_of(number), {Leaving::evicted, 0, number});
    }
    std::size_t found = 0;
    for (std::uint64_t number = 1; number <= kCount / 2; ++number) {
        found += departures.find(name_of(number)).has_value();
    }
    CHECK(found > kCount / 2 * 19 / 20);
}

using namespace kvo::test;

namespace {

RemovedBlock block(std::uint64_t number) { return {.space = 7, .hash = {number, 1, 2, 3}}; }

std::vector<std::uint64_t> numbers(const RemovedLog::Taken& taken) {
    std::vector<std::uint64_t> found;
    for (const RemovedBlock& one : taken.blocks) {
        CHECK_EQUAL(one.space, 7u);
        found.push_back(one.hash[0]);
    }
    return found;
}

std::vector<RemovedBlock> take_all(SmallCache& cache) { return cache->removed().take(1000).blocks; }

}  // namespace

TEST(nothing_is_kept_unless_somebody_wants_to_know_what_is_removed) {
    RemovedLog log(4);
    log.add(block(1));
    CHECK(log.take(9).blocks.empty());
    log.watch(true);
    log.add(block(2));
    CHECK(log.is_wanted());
    CHECK(numbers(log.take(9)) == std::vector<std::uint64_t>{2});
    log.add(block(3));
    log.watch(false);
    log.watch(true);
    CHECK(log.take(9).blocks.empty());
}

TEST(removed_blocks_are_taken_in_their_order_a_part_at_a_time) {
    RemovedLog log(4);
    log.watch(true);
    std::uint64_t next = 0;
    std::vector<std::uint64_t> found;
    for (int round = 0; round < 10; ++round) {
        log.add(block(next++));
        log.add(block(next++));
        const RemovedLog::Taken taken = log.take(round < 2 ? 1 : 2);
        CHECK(!taken.is_all);
        CHECK_EQUAL(taken.lost, 0u);
        for (const std::uint64_t one : numbers(taken)) {
            found.push_back(one);
        }
    }
    const RemovedLog::Taken rest = log.take(9);
    CHECK(rest.is_all);
    for (const std::uint64_t one : numbers(rest)) {
        found.push_back(one);
    }
    CHECK_EQUAL(found.size(), next);
    for (std::uint64_t i = 0; i < next; ++i) {
        CHECK_EQUAL(found[i], i);
    }
}

TEST(removed_blocks_beyond_the_bound_are_counted) {
    RemovedLog log(2);
    log.watch(true);
    for (std::uint64_t i = 0; i < 5; ++i) {
        log.add(block(i));
    }
    const RemovedLog::Taken taken = log.take(1);
    CHECK_EQUAL(taken.lost, 3u);
    CHECK(numbers(taken) == std::vector<std::uint64_t>{0});
    CHECK_EQUAL(log.take(9).lost, 0u);
}

TEST(whatever_removes_a_block_of_a_cache_is_logged) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 4)), 4u);
    CHECK_EQUAL(cache->removals().invalidate(space, chain(1, 1)), 1u);
    CHECK(take_all(cache).empty());
    cache->removed().watch(true);
    CHECK_EQUAL(cache.put(session, space, chain(2, 3)), 3u);
    CHECK_EQUAL(cache->removals().invalidate(space, chain(2, 1)), 1u);
    const std::vector<RemovedBlock> first = take_all(cache);
    CHECK_EQUAL(first.size(), 1u);
    CHECK_EQUAL(first[0].space, space);
    CHECK(first[0].hash == read_hash(chain(2, 1).data()));
    CHECK(cache->removals().evict(1) > 0);
    CHECK_EQUAL(take_all(cache).size(), 1u);
    CHECK_EQUAL(cache->removals().clear(namespace_of(space)), 4u);
    CHECK_EQUAL(take_all(cache).size(), 4u);
}
