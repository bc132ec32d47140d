// Calls that a thread that never waits leaves at the writer's lock.
#include <algorithm>
#include <thread>

#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kMany = 300;  // more than one part

struct Scene {
    SmallCache cache;
    const SessionId session = cache.session();
    const Space space = cache.open();
    const Hashes hashes = chain(1, kMany);

    OwnedBatch batch_of(const std::vector<Ticket>& tickets) {
        cache.write(session, space, hashes, tickets);
        OwnedBatch batch{.space = space, .tickets = tickets, .hashes = hashes, .parents = parents_of(hashes)};
        for (std::size_t i = 0; i < tickets.size(); ++i) {
            const std::uint64_t address = cache.locate(session, std::span(tickets).subspan(i, 1))[0];
            const auto record = cache.record(space, address);
            const Fingerprint name = fingerprint(1);
            batch.digests.push_back(digest_record({reinterpret_cast<const std::uint8_t*>(record.data()), record.size()},
                                                  {name, hash_at(hashes, i).first<kHashBytes>(), 0, 0}));
        }
        return batch;
    }
};

// On a thread of its own, as long as another has the lock.
template <typename Call>
void call_beside_a_writer(CacheCore& core, Call call) {
    const auto held = core.hold_writer();
    std::thread(call).join();
}

}  // namespace

TEST(a_reservation_and_a_commit_are_made_by_who_has_the_lock) {
    Scene scene;
    CacheCore& core = *scene.cache;
    std::shared_ptr<const LeftReservation> room;
    call_beside_a_writer(core, [&] {
        room = core.reservations().leave_reserve(scene.session, 0, scene.space, scene.hashes);
        CHECK(!room->is_done.load());
    });
    CHECK(room->is_done.load() && room->status.ok());
    CHECK_EQUAL(room->tickets.size(), kMany);
    OwnedBatch batch = scene.batch_of(room->tickets);
    std::shared_ptr<const LeftCommit> stored;
    call_beside_a_writer(core, [&] {
        stored = core.commits().leave_commit(scene.session, std::move(batch));
        CHECK(!stored->is_done.load());
        CHECK_EQUAL(scene.cache.count_readable(scene.space, scene.hashes), 0u);
    });
    CHECK(stored->is_done.load() && stored->status.ok());
    CHECK(std::ranges::all_of(stored->outcomes, [](CommitOutcome one) { return one == CommitOutcome::readable; }));
    CHECK(scene.cache.take(scene.session, scene.space, scene.hashes).has_value());
}

TEST(where_nobody_writes_all_is_done_at_once) {
    Scene scene;
    CacheCore& core = *scene.cache;
    const auto room = core.reservations().leave_reserve(scene.session, 0, scene.space, scene.hashes);
    CHECK(room->is_done.load());
    CHECK(core.commits().leave_commit(scene.session, scene.batch_of(room->tickets))->is_done.load());
    CHECK_EQUAL(scene.cache.count_readable(scene.space, scene.hashes), kMany);
    core.removals().leave_invalidate(scene.space, scene.hashes);
    CHECK_EQUAL(scene.cache.count_readable(scene.space, scene.hashes), 0u);
    const auto again = core.reservations().leave_reserve(scene.session, 0, scene.space, scene.hashes);
    core.reservations().leave_abort(scene.session, again->tickets);
    CHECK_EQUAL(core.stats().reserved, 0u);
    CHECK_EQUAL(core.stats().used_bytes, 0u);
}

TEST(what_a_tier_has_is_evicted_first) {
    constexpr std::size_t kFew = 7;  // of one age
    SmallCache cache(small_options(1, "prefix"));
    const SessionId session = cache.session();
    const Space space = cache.open();
    const Hashes kept = chain(1, kFew);
    const Hashes tiered = chain(2, kFew);
    CHECK_EQUAL(cache.put(session, space, kept), kFew);
    CHECK_EQUAL(cache.put(session, space, tiered), kFew);
    Hashes hashes = chain(3, kMany);  // not here
    std::vector<std::uint8_t> has(kMany, 1);
    hashes.insert(hashes.end(), kept.begin(), kept.end());
    has.resize(kMany + kFew, 0);
    hashes.insert(hashes.end(), tiered.begin(), tiered.end());
    has.resize(kMany + 2 * kFew, 1);
    call_beside_a_writer(*cache, [&] { cache->removals().leave_tier_notes(space, hashes, has); });
    const std::uint64_t half_bytes = cache->stats().used_bytes / 2;
    CHECK_EQUAL(cache->removals().evict(half_bytes), half_bytes);
    CHECK_EQUAL(cache.count_readable(space, kept), kFew);
    CHECK_EQUAL(cache.count_readable(space, tiered), 0u);
}

TEST(what_a_tier_finds_no_room_for_lets_nothing_go) {
    Scene scene;
    CacheCore& core = *scene.cache;
    const SessionId other = scene.cache.session();
    const std::size_t all = kSegmentBytes / 4096;
    CHECK_EQUAL(scene.cache.reserve(other, scene.space, chain(2, all)).size(), all);
    const auto room = core.reservations().leave_reserve(scene.session, 0, scene.space, scene.hashes);
    CHECK(room->is_done.load() && room->status.ok() && room->tickets.empty());
    CHECK_EQUAL(core.reservations().refused(), 1u);
    CHECK_EQUAL(core.reservations().without_room(), 0u);
}

TEST(what_cannot_be_is_said_at_once) {
    Scene scene;
    CacheCore& core = *scene.cache;
    const auto nowhere = core.reservations().leave_reserve(scene.session, 0, make_space(77, 0), scene.hashes);
    CHECK(nowhere->is_done.load() && nowhere->status.code() == Code::invalid);
    const auto room = core.reservations().leave_reserve(scene.session, 0, scene.space, scene.hashes);
    OwnedBatch batch = scene.batch_of(room->tickets);
    batch.digests.pop_back();
    const auto stored = core.commits().leave_commit(scene.session, std::move(batch));
    CHECK(stored->is_done.load() && stored->status.code() == Code::invalid);
}

TEST(nothing_that_a_servers_loop_asks_for_waits_for_a_writer) {
    Scene scene;
    CacheCore& core = *scene.cache;
    CHECK_EQUAL(scene.cache.put(scene.session, scene.space, scene.hashes), kMany);
    CHECK(core.open_tenant("known", 1 << 20).ok());
    const auto held_by_tier = scene.cache.take(scene.session, scene.space, scene.hashes);
    CHECK(held_by_tier.has_value());
    CHECK_EQUAL(core.removals().invalidate(scene.space, scene.hashes), kMany);
    const SessionId ended = scene.cache.session();
    CHECK_EQUAL(scene.cache.reserve(ended, scene.space, chain(2, kMany)).size(), kMany);
    core.sessions().quarantine(ended);
    const std::uint32_t idle = namespace_of(scene.cache.open(plain_geometry(), 9));
    call_beside_a_writer(core, [&] {
        CHECK_EQUAL(core.stats().tenants.size(), 2u);
        CHECK(core.open_tenant("known", 1 << 21).ok());
        core.memory().note_user(1234);
        CHECK(core.namespaces().open(fingerprint(8), plain_geometry()).ok());
        const std::vector<std::uint32_t> forgotten = core.removals().forget_namespaces(std::vector<std::uint32_t>{});
        CHECK(std::ranges::find(forgotten, idle) != forgotten.end());
        CHECK(core.leases().release(scene.session, held_by_tier->lease));
        CHECK_EQUAL(core.reclaim_ended(), 0u);
        CHECK(!core.removals().leave_evict(std::vector<std::uint32_t>{namespace_of(scene.space)}));
        CHECK(value_of(core.leases().acquire_entries(scene.session, scene.space, chain(1, 1), {}, LeaseFor::upkeep))
                  .lease == 0);
    });
    CHECK_EQUAL(core.stats().quarantined, 0u);
    CHECK_EQUAL(core.stats().reserved, 0u);
    CHECK_EQUAL(core.reclaim_ended(), 1u);
    CHECK_EQUAL(core.stats().tenants[1].quota_bytes, 1u << 21);
}

TEST(a_damaged_block_that_a_tier_wants_loses_its_name_without_waiting) {
    CacheOptions options = small_options();
    options.verify = Verify::always;
    SmallCache cache(options);
    const SessionId session = cache.session();
    const Space space = cache.open();
    const Hashes hashes = chain(1, 1);
    CHECK_EQUAL(cache.put(session, space, hashes), 1u);
    const auto acquired = cache.take(session, space, hashes);
    CHECK(acquired.has_value());
    cache.record(space, acquired->groups[0].addresses[0])[0] ^= std::byte{1};
    CHECK(cache->leases().release(session, acquired->lease));
    call_beside_a_writer(*cache, [&] {
        CHECK(value_of(cache->leases().acquire_entries(session, space, hashes, {}, LeaseFor::upkeep)).outcome ==
              AcquireOutcome::miss);
    });
    CHECK(!cache.has(space, 1));
    CHECK_EQUAL(cache->stats().mismatches, 1u);
    CHECK_EQUAL(cache->stats().used_bytes, 0u);
}

TEST(an_identity_is_evicted_with_all_that_nobody_reads) {
    Scene scene;
    CacheCore& core = *scene.cache;
    const Space other = scene.cache.open(plain_geometry(), 2);
    CHECK_EQUAL(scene.cache.put(scene.session, scene.space, scene.hashes), kMany);
    CHECK_EQUAL(scene.cache.put(scene.session, other, scene.hashes), kMany);
    const auto read = scene.cache.take(scene.session, scene.space, chain(1, 1));
    CHECK(core.removals().leave_evict(std::vector<std::uint32_t>{namespace_of(scene.space)}));
    CHECK_EQUAL(scene.cache.count_readable(scene.space, scene.hashes), 0u);
    CHECK_EQUAL(scene.cache.count_readable(other, scene.hashes), kMany);
    CHECK_EQUAL(core.stats().evicted, kMany);
    CHECK_EQUAL(core.stats().quarantined, 1u);
    CHECK(core.removals().forget_namespaces(std::vector<std::uint32_t>{}).empty());
    CHECK(core.leases().release(scene.session, read->lease));
    CHECK_EQUAL(core.removals().forget_namespaces(std::vector<std::uint32_t>{namespace_of(other)}).size(), 1u);
}
