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

namespace {

constexpr std::size_t kBlocksPerSegment = kSegmentBytes / 4096;

std::uint64_t held_bytes(SmallCache& cache) {
    std::uint64_t held = 0;
    for (const Segment& segment : cache->memory().segments()) {
        held += segment.held_bytes();
    }
    return held;
}

// Four segments, full, and a session.
struct FullCache {
    FullCache() : cache(small_options(4)), space(cache.open()), session(cache.session()) {
        for (std::uint64_t prompt = 0; prompt < 4; ++prompt) {
            CHECK_EQUAL(cache.put(session, space, chain(prompt, kBlocksPerSegment)), kBlocksPerSegment);
        }
        CHECK_EQUAL(held_bytes(cache), 4 * kSegmentBytes);
    }
    Shrunk shrink(std::uint64_t segments) { return value_of(cache->growth().shrink(segments * kSegmentBytes)); }
    std::uint64_t leaving_from() { return cache->memory().index().view().header->leaving_from.load(); }

    SmallCache cache;
    Space space;
    SessionId session;
};

}  // namespace

TEST(memory_is_given_back_in_whole_segments_and_the_blocks_worth_most_stay) {
    FullCache full;
    const Shrunk shrunk = full.shrink(2);
    CHECK(shrunk.is_done);
    CHECK_EQUAL(shrunk.freed_bytes, 2 * kSegmentBytes);
    CHECK_EQUAL(full.cache->memory().ready_bytes(), 2 * kSegmentBytes);
    CHECK_EQUAL(held_bytes(full.cache), 2 * kSegmentBytes);
    CHECK_EQUAL(full.leaving_from(), 0u);
    // The oldest went, though they were in the segments that stay; the others moved there.
    CHECK_EQUAL(full.cache.count_readable(full.space, chain(0, kBlocksPerSegment)), 0u);
    CHECK_EQUAL(full.cache.count_readable(full.space, chain(1, kBlocksPerSegment)), 0u);
    CHECK(full.cache.take(full.session, full.space, chain(2, kBlocksPerSegment)).has_value());
    CHECK(full.cache.take(full.session, full.space, chain(3, kBlocksPerSegment)).has_value());
    CHECK_EQUAL(full.cache->stats().evicted, 2 * kBlocksPerSegment);
    CHECK(full.shrink(2).is_done);
    CHECK_EQUAL(full.shrink(2).freed_bytes, 0u);
}

TEST(the_first_segment_is_never_given_back) {
    FullCache full;
    CHECK(full.shrink(0).is_done);
    CHECK_EQUAL(full.cache->memory().ready_bytes(), kSegmentBytes);
    CHECK(full.cache.put_one(full.session, full.space, 9));
}

TEST(a_pool_that_gave_memory_back_grows_again_and_has_all_its_room) {
    FullCache full;
    PopulateProgress progress;
    for (int times = 0; times < 3; ++times) {
        CHECK(full.shrink(1).is_done);
        CHECK(full.cache->growth().grow_fully(progress).ok());
        CHECK_EQUAL(held_bytes(full.cache), 4 * kSegmentBytes);
        const std::uint64_t evicted = full.cache->stats().evicted;
        for (std::uint64_t prompt = 0; prompt < 3; ++prompt) {
            const Hashes hashes = chain(100 * (times + 1) + prompt, kBlocksPerSegment);
            CHECK_EQUAL(full.cache.put(full.session, full.space, hashes), kBlocksPerSegment);
        }
        CHECK_EQUAL(full.cache->stats().evicted, evicted);
        CHECK_EQUAL(full.cache->stats().used_bytes, 4 * kSegmentBytes);
    }
}

TEST(leases_and_reservations_keep_their_segment_and_its_bytes) {
    FullCache full;
    const SessionId reader = full.cache.session();
    // The blocks stand in the order in which they were stored.
    const Hashes leased = chain(2, 1);
    const auto lease = full.cache.take(reader, full.space, leased);
    CHECK(lease.has_value());
    const std::uint64_t address = lease->groups[0].addresses[0];
    CHECK_EQUAL(address / kSegmentBytes, 2u);
    const Shrunk shrunk = full.shrink(1);
    CHECK(!shrunk.is_done);
    CHECK_EQUAL(shrunk.freed_bytes, kSegmentBytes);
    CHECK_EQUAL(full.cache->memory().ready_bytes(), 3 * kSegmentBytes);
    CHECK_EQUAL(full.leaving_from(), kSegmentBytes);
    CHECK(full.cache.is_right(*lease, full.space, leased));
    // Nothing is stored in what is to go.
    for (std::uint64_t key = 1000; key < 1000 + 2 * kBlocksPerSegment; ++key) {
        CHECK(full.cache.put_one(full.session, full.space, key));
        const auto stored = full.cache.take(full.session, full.space, chain(key, 1));
        CHECK(stored.has_value());
        CHECK(stored->groups[0].addresses[0] < kSegmentBytes);
        CHECK(full.cache->leases().release(full.session, stored->lease));
    }
    CHECK(full.cache->leases().release(reader, lease->lease));
    CHECK(full.shrink(1).is_done);
    CHECK_EQUAL(held_bytes(full.cache), kSegmentBytes);

    PopulateProgress progress;
    CHECK(full.cache->growth().grow_fully(progress).ok());
    std::vector<Ticket> tickets;
    std::vector<std::uint64_t> addresses;
    Hashes hashes = chain(7, 3 * kBlocksPerSegment);
    tickets = full.cache.reserve(full.session, full.space, hashes);
    CHECK_EQUAL(tickets.size(), 3 * kBlocksPerSegment);
    CHECK(!full.shrink(1).is_done);
    full.cache.write(full.session, full.space, hashes, tickets);
    full.cache.commit(full.session, full.space, hashes, tickets);
    CHECK(full.cache.take(reader, full.space, hashes).has_value());
}

TEST(what_was_to_be_given_back_and_is_in_use_still_is_used_again_when_the_pool_grows) {
    FullCache full;
    const auto lease = full.cache.take(full.session, full.space, chain(3, 1));
    CHECK(lease.has_value());
    CHECK(!full.shrink(1).is_done);
    const std::uint64_t ready = full.cache->memory().ready_bytes();
    CHECK(ready > kSegmentBytes);
    PopulateProgress progress;
    CHECK(full.cache->growth().grow_fully(progress).ok());
    CHECK_EQUAL(full.leaving_from(), 0u);
    const std::uint64_t evicted = full.cache->stats().evicted;
    for (std::uint64_t prompt = 10; prompt < 13; ++prompt) {
        const Hashes hashes = chain(prompt, kBlocksPerSegment - 1);
        CHECK_EQUAL(full.cache.put(full.session, full.space, hashes), kBlocksPerSegment - 1);
    }
    CHECK_EQUAL(full.cache->stats().evicted, evicted);
    CHECK(full.cache.is_right(*lease, full.space, chain(3, 1)));
}

TEST(records_of_other_sizes_move_too_or_go) {
    SmallCache cache(small_options(4));
    const Space space = cache.open(hybrid_geometry());
    const SessionId session = cache.session();
    for (std::uint64_t prompt = 0; prompt < 60; ++prompt) {
        for (std::uint32_t group = 0; group < 4; ++group) {
            cache.put(session, space + group, chain(prompt, 50));
        }
    }
    CHECK(value_of(cache->growth().shrink(kSegmentBytes)).is_done);
    CHECK(cache->stats().used_bytes <= kSegmentBytes);
    std::size_t served = 0;
    for (std::uint64_t prompt = 0; prompt < 60; ++prompt) {
        for (std::uint32_t group = 0; group < 4; ++group) {
            for (std::size_t block = 0; block < 50; ++block) {
                if (const auto lease = cache.take(session, space + group, chain(prompt, 1, block))) {
                    CHECK(cache->leases().release(session, lease->lease));
                    ++served;
                }
            }
        }
    }
    CHECK(served > 100);
    CHECK(cache->stats().used_bytes > kSegmentBytes / 2);
}

TEST(a_segment_that_a_driver_has_pinned_is_not_used_and_goes_when_it_is_unpinned) {
    FullCache full;
    const auto files = full.cache->memory().files();
    FileDescriptor index = value_of(full.cache->open_index(full.session));
    CHECK(mark_pinned(index.number(), 3, true).ok());
    const Shrunk shrunk = full.shrink(1);
    CHECK(!shrunk.is_done);
    CHECK_EQUAL(shrunk.freed_bytes, 2 * kSegmentBytes);
    CHECK_EQUAL(shrunk.pinned_bytes, kSegmentBytes);
    CHECK_EQUAL(full.cache->memory().ready_bytes(), kSegmentBytes);
    CHECK(mark_pinned(index.number(), 3, false).ok());
    CHECK(full.shrink(1).is_done);
    CHECK(mark_pinned(index.number(), 1, true).ok());
    PopulateProgress progress;
    CHECK(full.cache->growth().grow_fully(progress).ok());
    CHECK_EQUAL(full.shrink(1).pinned_bytes, kSegmentBytes);
    // The kernel takes the mark away with the process's last descriptor.
    index = FileDescriptor();
    CHECK_EQUAL(full.shrink(1).freed_bytes, kSegmentBytes);
}

TEST(an_engine_that_does_not_know_of_it_keeps_all_memory) {
    FullCache full;
    const SessionId old = full.cache.session();
    const FileDescriptor index = value_of(full.cache->open_index(old, false));
    const auto refused = full.cache->growth().shrink(kSegmentBytes);
    CHECK(refused.fault().code() == Code::unavailable);
    CHECK_EQUAL(full.cache->memory().ready_bytes(), 4 * kSegmentBytes);
    // The same holds for a successor of this process.
    full.cache.restart();
    CHECK(full.cache->growth().shrink(kSegmentBytes).fault().code() == Code::unavailable);
}

TEST(a_successor_has_what_was_kept_and_grows) {
    FullCache full;
    CHECK(full.shrink(2).is_done);
    const auto lease = full.cache.take(full.session, full.space, chain(3, 1));
    CHECK(!full.shrink(1).is_done || full.cache->memory().ready_bytes() == kSegmentBytes);
    const std::uint64_t ready = full.cache->memory().ready_bytes();
    full.cache.restart();
    CHECK_EQUAL(full.cache->memory().ready_bytes(), ready);
    CHECK_EQUAL(full.leaving_from(), 0u);
    CHECK_EQUAL(full.cache.count_readable(full.space, chain(3, 1)), 1u);
    PopulateProgress progress;
    CHECK(full.cache->growth().grow_fully(progress).ok());
    CHECK_EQUAL(full.cache->memory().ready_bytes(), 4 * kSegmentBytes);
}
