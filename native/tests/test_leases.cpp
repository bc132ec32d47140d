#include <array>
#include <random>

#include "hybrid_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

TEST(the_longest_boundary_that_all_groups_accept) {
    Hybrid model;
    model.put_all(1, 256);
    model.check_hit(model.acquire(1, 16), 1, 0, 256);
    model.check_hit(model.acquire(1, 16, 0, 255), 1, 0, 192);  // states lie every 64 tokens
    model.check_hit(model.acquire(1, 15), 1, 0, 192);
    model.check_hit(model.acquire(1, 16, 70), 1, 70, 256);
    model.check_hit(model.acquire(1, 16, 0, ~0ull, 128), 1, 0, 256);
    model.check_hit(model.acquire(1, 15, 0, ~0ull, 128), 1, 0, 128);
    CHECK(model.acquire(1, 16, 256).outcome == AcquireOutcome::miss);
    CHECK(model.acquire(1, 3).outcome == AcquireOutcome::miss);
    CHECK(model.acquire(2, 16).outcome == AcquireOutcome::miss);
    CHECK_EQUAL(model.acquire(1, 16, 256).boundary, 256u);
    const CacheStats stats = model.cache->stats();
    CHECK_EQUAL(stats.hits, 6u);
    CHECK_EQUAL(stats.misses, 4u);
    CHECK_EQUAL(stats.leases, 6u);
}

TEST(what_a_group_lacks_shortens_the_boundary) {
    struct Case {
        std::uint32_t group;
        std::uint64_t block;
        std::size_t hashes;      // of the request
        std::uint64_t boundary;  // 0: a miss
    };
    // Without one block of one group; 256 tokens are there, and boundaries are at 64, 128, 192 and 256.
    const std::vector<Case> cases = {
        {0, 15, 16, 192}, {0, 4, 16, 64},  {0, 0, 16, 0},   {1, 15, 16, 192}, {1, 13, 16, 192}, {1, 12, 16, 256},
        {1, 5, 16, 256},  {2, 3, 16, 192}, {2, 0, 16, 256}, {2, 0, 4, 0},     {3, 7, 16, 256},  {3, 5, 16, 256},
        {3, 5, 12, 128},  {3, 3, 12, 192}, {3, 1, 4, 0},    {4, 3, 16, 256},
    };
    for (const Case& lacking : cases) {
        Hybrid model;
        model.put_all(1, 256);
        const Hashes gone = model.keys(lacking.group, 1, lacking.block, lacking.block + 1);
        CHECK_EQUAL(model.cache->removals().invalidate(model.space(lacking.group), gone), 1u);
        const Acquired acquired = model.acquire(1, lacking.hashes);
        if (lacking.boundary == 0) {
            CHECK(acquired.outcome == AcquireOutcome::miss);
        } else {
            model.check_hit(acquired, 1, 0, lacking.boundary);
        }
    }
}

TEST(a_boundary_that_needs_nothing_leases_nothing) {
    SmallCache cache;
    Geometry chunks = plain_geometry();
    chunks.groups[0].rule = BoundaryRule::chunk;
    chunks.groups[0].window = 64;
    const Space space = cache.open(chunks);
    const SessionId session = cache.session();
    const Hashes request = chain(1, 8);
    const Acquired acquired = value_of(
        cache->leases().acquire(session, {.name_space = namespace_of(space), .chain = request, .limit = ~0ull}));
    CHECK(acquired.outcome == AcquireOutcome::hit);
    CHECK_EQUAL(acquired.boundary, 128u);  // a chunk begins there
    CHECK_EQUAL(acquired.lease, 0u);
    CHECK(acquired.groups[0].addresses.empty());
    CHECK(!cache->leases().release(session, acquired.lease));
    CHECK_EQUAL(cache->stats().leases, 0u);
}

TEST(questions_that_are_none_are_refused_in_one_line) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const Hashes hashes = chain(1, 2);
    const std::span<const std::uint8_t> torn = std::span(hashes).first(33);
    const std::uint32_t number = namespace_of(space);
    const std::vector<Result<Acquired>> refused = {
        cache->leases().acquire(session, {.name_space = number + 1, .chain = hashes, .limit = 64}),
        cache->leases().acquire(session, {.name_space = ~0u, .chain = hashes, .limit = 64}),
        cache->leases().acquire(session, {.name_space = number, .chain = torn, .limit = 64}),
        cache->leases().acquire(session, {.name_space = number, .chain = hashes, .limit = 64, .alignment = 0}),
        cache->leases().acquire_entries(session, space, torn),
        cache->leases().acquire_entries(session, space + 1, hashes),
        cache->leases().acquire_entries(session, make_space(4000, 0), hashes),
    };
    for (const auto& result : refused) {
        CHECK(!result.ok() && result.fault().code() == Code::invalid);
        CHECK(!result.fault().message().empty() && result.fault().message().find('\n') == std::string::npos);
    }
    CHECK(value_of(cache->leases().acquire_entries(session, space, {})).outcome == AcquireOutcome::miss);
    CHECK_EQUAL(cache->stats().leases, 0u);
    CHECK_EQUAL(cache->sessions().held_bytes(session), 0u);
}

TEST(a_lease_is_released_once_and_by_its_own_session) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const SessionId other = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 3)), 3u);
    const auto lease = cache.take(session, space, chain(1, 3));
    CHECK(lease.has_value());
    CHECK_EQUAL(cache->sessions().held_bytes(session), 3u * 4096);
    CHECK(!cache->leases().release(other, lease->lease));
    CHECK(!cache->leases().release(session, lease->lease + 1));
    CHECK(!cache->leases().release(session, 0));
    CHECK_EQUAL(cache->removals().evict(kSegmentBytes), 0u);
    CHECK(cache->leases().release(session, lease->lease));
    CHECK(!cache->leases().release(session, lease->lease));
    CHECK_EQUAL(cache->sessions().held_bytes(session), 0u);
    CHECK_EQUAL(cache->removals().evict(kSegmentBytes), 3u * 4096);
    CHECK(!cache.take(session, space, chain(1, 3)));  // all or none
}

TEST(a_lease_for_upkeep_is_no_use) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 2)), 2u);
    std::array<std::uint8_t, 3> used{};
    const auto upkeep = value_of(cache->leases().acquire_entries(session, space, chain(1, 2), {}, LeaseFor::upkeep));
    CHECK(upkeep.outcome == AcquireOutcome::hit);
    CHECK_EQUAL(cache->removals().evict(kSegmentBytes), 0u);  // it holds, as any
    CHECK(cache->search().find_used(space, chain(1, 3), used).ok());
    CHECK((used == std::array<std::uint8_t, 3>{0, 0, 0}));
    CHECK(value_of(cache->leases().acquire_entries(session, space, chain(9, 1), {}, LeaseFor::upkeep)).outcome ==
          AcquireOutcome::miss);
    CHECK_EQUAL(cache->stats().hits + cache->stats().misses, 0u);
    CHECK(cache.take(session, space, chain(1, 1, 1)).has_value());
    CHECK(cache->search().find_used(space, chain(1, 3), used).ok());
    CHECK((used == std::array<std::uint8_t, 3>{0, 1, 0}));
    CHECK(!cache->search().find_used(space, chain(1, 2), used).ok());
}

TEST(what_is_kept_is_not_read) {
    CacheOptions options = small_options();
    options.verify = Verify::always;
    SmallCache cache(options);
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 2)), 2u);
    const auto used = cache.take(session, space, chain(1, 2));
    CHECK(used.has_value());
    cache.record(space, used->groups[0].addresses[0])[0] ^= std::byte{1};
    CHECK(cache->leases().release(session, used->lease));
    const auto kept = value_of(cache->leases().acquire_entries(session, space, chain(1, 2), {}, LeaseFor::keep));
    CHECK(kept.outcome == AcquireOutcome::hit);
    CHECK_EQUAL(cache->stats().mismatches, 0u);
    CHECK_EQUAL(cache->removals().evict(kSegmentBytes), 0u);  // it holds, as any
    // An acquire for use checks the records.
    CHECK(value_of(cache->leases().acquire_entries(session, space, chain(1, 2))).outcome == AcquireOutcome::miss);
    CHECK_EQUAL(cache->stats().mismatches, 1u);
    CHECK(cache->leases().release(session, kept.lease));
    CHECK_EQUAL(cache->stats().quarantined, 0u);
    CHECK(value_of(cache->leases().acquire_entries(session, space, chain(9, 1), {}, LeaseFor::keep)).outcome ==
          AcquireOutcome::miss);
    CHECK_EQUAL(cache->stats().hits, 1u);
}

TEST(uses_are_told_from_those_before_a_moment) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 3)), 3u);
    CHECK(cache.take(session, space, chain(1, 1)).has_value());
    const std::uint32_t before = cache->search().use_clock();
    CHECK(cache.take(session, space, chain(1, 1, 1)).has_value());
    std::array<std::uint8_t, 3> used{};
    CHECK(cache->search().find_used(space, chain(1, 3), used, before).ok());
    CHECK((used == std::array<std::uint8_t, 3>{0, 1, 0}));
    CHECK(cache->search().find_used(space, chain(1, 3), used).ok());
    CHECK((used == std::array<std::uint8_t, 3>{1, 1, 0}));
    CHECK(cache->search().find_used(space, chain(1, 3), used, cache->search().use_clock()).ok());
    CHECK((used == std::array<std::uint8_t, 3>{0, 0, 0}));
}

TEST(what_a_session_may_hold_is_bounded_and_nothing_stays_pinned) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId writer = cache.session();
    CHECK_EQUAL(cache.put(writer, space, chain(1, 4)), 4u);
    const SessionId poor = cache.session(3 * 4096);
    const SessionId none = 0;
    for (const SessionId session : {poor, none}) {
        CHECK(value_of(cache->leases().acquire_entries(session, space, chain(1, 4))).outcome ==
              AcquireOutcome::over_limit);
    }
    CHECK_EQUAL(cache->stats().refused, 2u);
    CHECK_EQUAL(cache->stats().leases, 0u);
    CHECK_EQUAL(cache->sessions().held_bytes(poor), 0u);
    const auto some = cache.take(poor, space, chain(1, 3));
    CHECK(some.has_value());
    CHECK(value_of(cache->leases().acquire_entries(poor, space, chain(1, 1))).outcome == AcquireOutcome::over_limit);
    CHECK_EQUAL(cache.reserve(poor, space, chain(9, 1)).size(), 0u);  // both count
    CHECK(cache->leases().release(poor, some->lease));
    CHECK_EQUAL(cache->removals().evict(kSegmentBytes), 4u * 4096);
}

TEST(leases_hold_what_they_name_whatever_happens_to_the_rest) {
    for (const auto verify : {Verify::adopted, Verify::always}) {
        CacheOptions options = small_options();
        options.verify = verify;
        SmallCache cache(options);
        const Space small = cache.open(plain_geometry(4096), 1);
        const Space large = cache.open(plain_geometry(100000), 2);
        const SessionId session = cache.session();
        CHECK_EQUAL(cache.put(session, small, chain(1, 40)), 40u);
        CHECK_EQUAL(cache.put(session, large, chain(1, 3)), 3u);
        const auto held = cache.take(session, small, chain(1, 40));
        const auto held_large = cache.take(session, large, chain(1, 3));
        CHECK(held && held_large);
        std::mt19937_64 random(1);
        for (std::uint64_t prompt = 2; prompt < 400; ++prompt) {
            CHECK(cache.put(session, random() % 2 ? small : large, chain(prompt, 8)) > 0);
            CHECK(cache.is_right(*held, small, chain(1, 40)) && cache.is_right(*held_large, large, chain(1, 3)));
        }
        CHECK(cache->stats().evicted > 100);
        CHECK_EQUAL(cache.count_readable(small, chain(1, 40)), 40u);

        // Forgotten at once, and kept until the last lease ends.
        const auto again = cache.take(session, small, chain(1, 1));
        CHECK_EQUAL(cache->removals().invalidate(small, chain(1, 1)), 1u);
        CHECK_EQUAL(cache->removals().invalidate(small, chain(1, 1)), 0u);
        CHECK(cache->removals().clear(namespace_of(small)) >= 39);
        CHECK_EQUAL(cache.count_readable(small, chain(1, 40)), 0u);
        CHECK(!cache.take(session, small, chain(1, 1)));
        CHECK_EQUAL(cache->stats().quarantined, 40u);
        CHECK(cache.put(session, small, chain(1, 1)) == 1);  // the same name, another slot
        CHECK(cache.is_right(*held, small, chain(1, 40)));
        CHECK(cache->leases().release(session, held->lease));
        CHECK_EQUAL(cache->stats().quarantined, 1u);
        CHECK(cache->leases().release(session, again->lease));
        CHECK_EQUAL(cache->stats().quarantined, 0u);
        CHECK(cache->leases().release(session, held_large->lease));
        cache->removals().evict(kSegmentBytes);
        CHECK_EQUAL(cache->stats().used_bytes, 0u);
    }
}

TEST(what_was_used_goes_last) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    for (std::uint64_t key = 0; key < 20; ++key) {
        CHECK(cache.put_one(session, space, key));
    }
    CHECK(cache.is_served(session, space, 3));
    CHECK(cache.is_served(session, space, 0));
    CHECK_EQUAL(cache->removals().evict(18 * 4096), 18u * 4096);
    CHECK(cache.has(space, 3) && cache.has(space, 0));
    CHECK_EQUAL(cache->removals().evict(1), 4096u);
    CHECK(!cache.has(space, 3) && cache.has(space, 0));
    CHECK_EQUAL(cache->stats().lost_touches, 0u);
}

// Two prompts in one call do not hang on each other.
TEST(entries_acquired_together_are_not_one_prompt) {
    SmallCache cache(small_options(1, "prefix"));
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 2)), 2u);
    CHECK_EQUAL(cache.put(session, space, chain(2, 2)), 2u);
    Hashes both = chain(1, 2);
    const Hashes second_prompt = chain(2, 2);
    both.insert(both.end(), second_prompt.begin(), second_prompt.end());
    const Acquired acquired = value_of(cache->leases().acquire_entries(session, space, both));
    CHECK(acquired.outcome == AcquireOutcome::hit);
    CHECK(cache->leases().release(session, acquired.lease));
    const Acquired kept = value_of(cache->leases().acquire_entries(session, space, chain(2, 2)));
    CHECK(kept.outcome == AcquireOutcome::hit);
    CHECK_EQUAL(cache->removals().evict(kNoLimit), 2u * 4096);
    CHECK_EQUAL(cache.count_readable(space, chain(2, 2)), 2u);
}

// Nor do the groups of one request.
TEST(blocks_of_one_group_do_not_hang_on_those_of_another) {
    SmallCache cache(small_options(1, "prefix"));
    Geometry geometry = plain_geometry();
    geometry.groups.push_back(geometry.groups.front());
    const Space first = cache.open(geometry);
    const Space second = make_space(namespace_of(first), 1);
    const SessionId session = cache.session();
    const Hashes hashes = chain(1, 2);
    CHECK_EQUAL(cache.put(session, first, hashes), 2u);
    CHECK_EQUAL(cache.put(session, second, hashes), 2u);
    const BoundaryQuery query{.name_space = namespace_of(first), .chain = hashes, .limit = 32};
    const Acquired acquired = value_of(cache->leases().acquire(session, query));
    CHECK(acquired.outcome == AcquireOutcome::hit);
    CHECK(cache->leases().release(session, acquired.lease));
    const Acquired kept = value_of(cache->leases().acquire_entries(session, second, hashes));
    CHECK(kept.outcome == AcquireOutcome::hit);
    CHECK_EQUAL(cache->removals().evict(kNoLimit), 2u * 4096);
    CHECK_EQUAL(cache.count_readable(second, hashes), 2u);
}

TEST(a_block_that_is_named_often_is_leased_once) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 2)), 2u);
    Hashes hashes;
    for (int i = 0; i < 1000; ++i) {
        const Hashes one = chain(1, 1, static_cast<std::size_t>(i % 2));
        hashes.insert(hashes.end(), one.begin(), one.end());
    }
    for (int i = 0; i < 2; ++i) {
        const Acquired leased = value_of(cache->leases().acquire_entries(session, space, hashes));
        CHECK(leased.outcome == AcquireOutcome::hit);
        CHECK_EQUAL(leased.groups[0].addresses.size(), 1000u);
        CHECK(leased.groups[0].addresses[0] != leased.groups[0].addresses[1]);
        CHECK_EQUAL(leased.groups[0].addresses[0], leased.groups[0].addresses[998]);
        CHECK_EQUAL(cache->sessions().held_bytes(session), 2u * 4096);
        CHECK(cache->leases().release(session, leased.lease));
        CHECK_EQUAL(cache->sessions().held_bytes(session), 0u);
    }
}

// Otherwise one within its quota could only replace its own blocks, as nothing else may go.
TEST(a_tenant_has_no_more_in_use_than_its_quota) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const TenantNumber small = value_of(cache->open_tenant("small", 32 * 4096));
    const TenantNumber large = value_of(cache->open_tenant("large", 992 * 4096));
    for (std::uint64_t prompt = 1; prompt <= 5; ++prompt) {
        CHECK_EQUAL(cache.put(session, space, chain(prompt, 16), small), 16u);  // while there is room
    }
    const auto lease = [&](std::uint64_t prompt, LeaseFor purpose = LeaseFor::use) {
        return value_of(cache->leases().acquire_entries(session, space, chain(prompt, 16), {}, purpose));
    };
    const Acquired first = lease(1);
    CHECK(lease(2).outcome == AcquireOutcome::hit);
    CHECK(lease(3).outcome == AcquireOutcome::over_limit);
    CHECK(lease(1).outcome == AcquireOutcome::hit);  // it is in use already
    CHECK(lease(3, LeaseFor::upkeep).outcome == AcquireOutcome::hit);
    CHECK_EQUAL(cache.reserve(session, space, chain(6, 1), small).size(), 0u);
    // The memory has room, only the tenant may not use it.
    CHECK_EQUAL(cache->reservations().without_room(), 0u);
    // The others of its blocks go for a tenant within its quota.
    CHECK_EQUAL(cache.put(session, space, chain(10, 976), large), 976u);
    CHECK_EQUAL(cache.count_readable(space, chain(10, 976)), 976u);
    CHECK(cache->leases().release(session, first.lease));
}
