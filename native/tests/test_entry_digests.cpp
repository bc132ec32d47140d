#include "hybrid_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

TEST(digests_are_those_of_the_shards_that_were_asked_for) {
    Hybrid model;
    model.put_all(1, 64);
    const std::vector<std::vector<std::uint32_t>> asked = {{}, {0}, {1}, {2}, {2, 0}, {0, 1, 2}};
    for (const std::vector<std::uint32_t>& shards : asked) {
        const Acquired acquired = model.acquire(1, 4, 0, ~0ull, 1, shards);
        model.check_hit(acquired, 1, 0, 64);
        for (std::uint32_t group = 0; group < 4; ++group) {
            const LeasedGroup& leased = acquired.groups[group];
            const std::size_t count = leased.addresses.size();
            const Hashes keys = model.keys(group, 1, leased.first, leased.first + count);
            CHECK_EQUAL(leased.digests.size(), shards.size() * count);
            for (std::size_t i = 0; i < leased.digests.size(); ++i) {
                const std::uint32_t shard = shards[i / count];
                const bool has_shard = shard < model.cache.group(model.space(group)).shards;
                CHECK_EQUAL(leased.digests[i],
                            has_shard ? digest_by_hand(model.cache, model.space(group), leased.addresses[i % count],
                                                       hash_at(keys, i % count), shard)
                                      : kNoDigest);
            }
        }
        CHECK(model.cache->leases().release(model.session, acquired.lease));
    }
    CHECK_EQUAL(model.cache->stats().hits, asked.size());
}

TEST(a_changed_byte_is_a_miss_where_every_use_is_checked) {
    CacheOptions options = small_options();
    options.verify = Verify::always;
    Hybrid model(options);
    model.put_all(1, 128);
    const Acquired before = model.acquire(1, 8);
    model.check_hit(before, 1, 0, 128);
    const std::uint64_t damaged = before.groups[0].addresses[5];
    std::byte& changed = model.cache.record(model.space(0), damaged, 1)[2999];
    changed ^= std::byte{1};
    model.check_hit(model.acquire(1, 8), 1, 0, 64);  // block 5 of the prefix is gone
    CHECK_EQUAL(model.cache->stats().mismatches, 1u);
    CHECK_EQUAL(model.cache.count_readable(model.space(0), chain(1, 8)), 7u);
    CHECK_EQUAL(model.cache->stats().quarantined, 1u);
    changed ^= std::byte{1};
    CHECK(model.cache->leases().release(model.session, before.lease));
    CHECK_EQUAL(model.cache->stats().quarantined, 0u);
    model.put(0, 1, 5, 6);
    model.check_hit(model.acquire(1, 8), 1, 0, 128);

    // Without the wish the cache trusts what it saw written itself.
    SmallCache trusting;
    const Space space = trusting.open();
    const SessionId session = trusting.session();
    CHECK(trusting.put_one(session, space, 1));
    const auto lease = trusting.take(session, space, chain(1, 1));
    trusting.record(space, lease->groups[0].addresses[0])[0] ^= std::byte{1};
    CHECK(value_of(trusting->leases().acquire_entries(session, space, chain(1, 1))).outcome == AcquireOutcome::hit);
}
