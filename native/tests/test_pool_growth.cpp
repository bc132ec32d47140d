#include "cache/pool_growth.hpp"

#include "cache_fixture.hpp"
#include "made_up_files.hpp"

using namespace kvo;
using namespace kvo::test;

TEST(a_cache_serves_from_its_first_step_on_and_grows_beside_what_is_done) {
    CacheOptions options = small_options(3);
    options.step_bytes = kSegmentBytes / 2 + 1;  // whole extents of it
    PopulateProgress progress;
    const auto core = value_of(CacheCore::create(options, progress));
    const std::uint64_t step = kSegmentBytes / 2;
    CHECK_EQUAL(core->memory().capacity_bytes(), 3 * kSegmentBytes);
    CHECK_EQUAL(core->memory().files().segments.size(), 3u);
    CHECK_EQUAL(core->memory().ready_bytes(), step);
    std::uint64_t held = 0;
    for (const Segment& segment : core->memory().segments()) {
        held += segment.held_bytes();
    }
    CHECK_EQUAL(held, step);
    for (std::uint64_t ready = 2 * step; ready < 3 * kSegmentBytes; ready += step) {
        CHECK(value_of(core->growth().grow(progress)));
        CHECK_EQUAL(core->memory().ready_bytes(), ready);
        CHECK_EQUAL(core->stats().ready_bytes, ready);
        CHECK_EQUAL(core->stats().capacity_bytes, 3 * kSegmentBytes);
    }
    CHECK(!value_of(core->growth().grow(progress)));
    CHECK(!value_of(core->growth().grow(progress)));
    CHECK_EQUAL(core->memory().ready_bytes(), 3 * kSegmentBytes);
    CHECK_EQUAL(progress.done_bytes.load(), 3 * kSegmentBytes);
}

TEST(a_step_may_reach_over_segments) {
    CacheOptions options = small_options(5);
    options.step_bytes = 2 * kSegmentBytes + kExtentBytes;
    PopulateProgress progress;
    const auto core = value_of(CacheCore::create(options, progress));
    CHECK_EQUAL(core->memory().ready_bytes(), options.step_bytes);
    CHECK(core->growth().grow_fully(progress).ok());
    CHECK_EQUAL(core->memory().ready_bytes(), 5 * kSegmentBytes);
}

TEST(nothing_is_evicted_for_room_that_is_about_to_come) {
    CacheOptions options = small_options(2);
    options.step_bytes = kSegmentBytes;
    SmallCache cache(options, Growth::first_step);
    const Space space = cache.open();
    const SessionId session = cache.session();
    constexpr std::size_t kStep = kSegmentBytes / 4096;
    PopulateProgress cancelled;
    cancelled.is_cancelled = true;
    // A step that fails promises no room to wait for: stores evict as before.
    CHECK(cache->growth().grow(cancelled).fault().code() == Code::failed);
    CHECK_EQUAL(cache.put(session, space, chain(1, kStep)), kStep);
    CHECK_EQUAL(cache.put(session, space, chain(2, 10)), 10u);
    CHECK_EQUAL(cache->stats().evicted, 10u);
    cache->growth().expect_room(60);
    CHECK_EQUAL(cache.put(session, space, chain(3, 10)), 0u);
    CHECK_EQUAL(cache->stats().evicted, 10u);
    PopulateProgress progress;
    CHECK(!value_of(cache->growth().grow(progress)));
    CHECK_EQUAL(cache.put(session, space, chain(3, kStep)), kStep);
    CHECK_EQUAL(cache->stats().evicted, 10u);
    CHECK_EQUAL(cache.put(session, space, chain(4, 7)), 7u);
    CHECK_EQUAL(cache->stats().evicted, 17u);
}

TEST(a_shortage_on_the_way_leaves_a_smaller_cache_that_may_grow_later) {
    const MadeUpFiles proc("cache_short");
    CacheOptions options = small_options(4);
    options.step_bytes = kSegmentBytes;
    options.populate.proc = proc.root();
    // One part in 32 of it all is left to others.
    const std::uint64_t reserve = 99999999ull * 1024 / 32;
    proc.write_available(reserve + kSegmentBytes + 4096);
    SmallCache cache(options, Growth::first_step);
    PopulateProgress progress;
    CHECK(value_of(cache->growth().grow(progress)));
    proc.write_available(reserve + kSegmentBytes - 4096);
    for (int times = 0; times < 2; ++times) {
        const Status status = cache->growth().grow_fully(progress);
        CHECK(status.code() == Code::unavailable);
        CHECK(status.message().find("MemAvailable") != std::string::npos);
        CHECK_EQUAL(cache->memory().ready_bytes(), 2 * kSegmentBytes);
    }
    const Space space = cache.open();
    const SessionId session = cache.session();
    for (std::uint64_t prompt = 0; prompt < 3; ++prompt) {
        CHECK_EQUAL(cache.put(session, space, chain(prompt, kSegmentBytes / 4096)), kSegmentBytes / 4096);
    }
    CHECK_EQUAL(cache->stats().used_bytes, 2 * kSegmentBytes);
    proc.write_available(reserve + 2 * kSegmentBytes);
    CHECK(cache->growth().grow_fully(progress).ok());
    CHECK_EQUAL(cache->memory().ready_bytes(), 4 * kSegmentBytes);
}
