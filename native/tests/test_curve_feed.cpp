#include "cache/curve_feed.hpp"

#include <thread>

#include "cache_fixture.hpp"
#include "check.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kOwnSize = 2;  // the pool's own size among the curve's

MemoryCurve::Counts counts_of(SmallCache& cache) { return cache->memory_curve(); }

BoundaryQuery query_of(Space space, const Hashes& hashes) {
    return {.name_space = namespace_of(space), .chain = hashes, .limit = UINT64_MAX, .alignment = 16};
}

void load(SmallCache& cache, SessionId session, Space space, const Hashes& hashes) {
    const Acquired acquired = value_of(cache->leases().acquire(session, query_of(space, hashes)));
    CHECK(acquired.outcome == AcquireOutcome::hit);
    CHECK(cache->leases().release(session, acquired.lease));
}

}  // namespace

TEST(what_is_saved_is_asked_for_and_what_is_loaded_is_a_hit) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 10)), 10U);
    CHECK_EQUAL(counts_of(cache).asked.blocks, 10U);
    CHECK_EQUAL(counts_of(cache).asked.bytes, 10U * 4096);
    CHECK_EQUAL(counts_of(cache).hits[kOwnSize].blocks, 0U);
    load(cache, session, space, chain(1, 6));
    CHECK_EQUAL(counts_of(cache).asked.blocks, 16U);
    for (const PoolShare& hits : counts_of(cache).hits) {
        CHECK_EQUAL(hits.blocks, 6U);
        CHECK_EQUAL(hits.bytes, 6U * 4096);
    }
}

TEST(with_more_memory_what_was_evicted_would_have_been_a_hit) {
    SmallCache cache(small_options(1, "prefix"));
    const Space space = cache.open(plain_geometry(64 << 10));
    const SessionId session = cache.session();
    // 64 blocks fit, and 96 take turns.
    for (int round = 0; round < 10; ++round) {
        for (std::uint64_t prompt = 0; prompt < 24; ++prompt) {
            const Hashes hashes = chain(prompt, 4);
            if (cache.count_readable(space, hashes) == 4) {
                load(cache, session, space, hashes);
            } else {
                cache.put(session, space, hashes);
            }
        }
    }
    const MemoryCurve::Counts counts = counts_of(cache);
    CHECK(counts.hits[kOwnSize].blocks < counts.hits[kOwnSize + 1].blocks);
    CHECK(counts.hits[kOwnSize + 1].blocks * 10 >= counts.asked.blocks * 8);
    CHECK(counts.hits[0].blocks < counts.hits[kOwnSize].blocks);
}

TEST(every_group_counts_in_bytes_and_those_that_keep_prefixes_in_blocks) {
    SmallCache cache;
    const Space space = cache.open(hybrid_geometry());
    const SessionId session = cache.session();
    cache.put(session, space, chain(1, 4));
    cache.put(session, space + 1, chain(1, 4));
    cache.put(session, space + 2, chain(1, 4));
    CHECK_EQUAL(counts_of(cache).asked.blocks, 4U);
    CHECK_EQUAL(counts_of(cache).asked.bytes, 4U * (2 * 3000 + 1024 + 20000));
}

TEST(what_a_dead_process_left_is_known_and_not_asked_for) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    cache.put(session, space, chain(1, 10));
    cache.restart();
    CHECK_EQUAL(counts_of(cache).asked.blocks, 0U);
    const SessionId later = cache.session();
    load(cache, later, space, chain(1, 10));
    CHECK_EQUAL(counts_of(cache).asked.blocks, 10U);
    CHECK_EQUAL(counts_of(cache).hits[kOwnSize].blocks, 10U);
}

TEST(what_lost_its_name_is_no_hit_at_any_size) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    cache.put(session, space, chain(1, 3));
    cache->removals().invalidate(space, chain(1, 3));
    cache.put(session, space, chain(1, 3));
    CHECK_EQUAL(counts_of(cache).asked.blocks, 6U);
    CHECK_EQUAL(counts_of(cache).hits[4].blocks, 0U);
}

TEST(a_promoted_record_is_asked_for_when_it_is_used) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const Hashes hashes = chain(1, 3);
    const std::vector<Ticket> tickets = cache.reserve(session, space, hashes);
    cache.write(session, space, hashes, tickets);
    std::vector<CommitOutcome> outcomes(3);
    const Hashes parents = parents_of(hashes);
    CHECK(cache->commits()
              .commit(session,
                      {.space = space,
                       .tickets = tickets,
                       .hashes = hashes,
                       .parents = parents,
                       .digests = {},
                       .was_promoted = true},
                      outcomes)
              .ok());
    CHECK_EQUAL(counts_of(cache).asked.blocks, 0U);
    load(cache, session, space, hashes);
    CHECK_EQUAL(counts_of(cache).asked.blocks, 3U);
    CHECK_EQUAL(counts_of(cache).hits[kOwnSize].blocks, 0U);
}

TEST(in_a_pool_of_few_blocks_each_is_followed) {
    CacheOptions options = small_options(8, "prefix");
    options.entry_limit = 4000;
    SmallCache cache(std::move(options));
    const Space space = cache.open(plain_geometry(512));
    const SessionId session = cache.session();
    for (std::uint64_t prompt = 0; prompt < 100; ++prompt) {
        CHECK_EQUAL(cache.put(session, space, chain(prompt, 100)), 100U);
        CHECK_EQUAL(counts_of(cache).asked.blocks, (prompt + 1) * 100);
    }
    CHECK_EQUAL(counts_of(cache).one_in, 1U);
}

TEST(in_a_pool_of_many_blocks_a_sample_is_followed_and_all_are_counted) {
    SmallCache cache(small_options(8, "prefix"));
    const Space space = cache.open(plain_geometry(512));
    const SessionId session = cache.session();
    for (std::uint64_t prompt = 0; prompt < 50; ++prompt) {
        CHECK_EQUAL(cache.put(session, space, chain(prompt, 100)), 100U);
    }
    CHECK(counts_of(cache).one_in > 1);
    // Those since the last one that is followed are still to come.
    CHECK(counts_of(cache).asked.blocks > 4500 && counts_of(cache).asked.blocks <= 5000);
}

TEST(it_may_be_asked_while_others_write) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    std::thread reader([&] {
        for (int turn = 0; turn < 200; ++turn) {
            CHECK(counts_of(cache).hits[kOwnSize].blocks <= counts_of(cache).asked.blocks);
        }
    });
    for (std::uint64_t prompt = 0; prompt < 200; ++prompt) {
        cache.put(session, space, chain(prompt, 20));
    }
    reader.join();
    CHECK(counts_of(cache).asked.blocks > 0);
}
