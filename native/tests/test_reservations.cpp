#include "cache/reservations.hpp"

#include "cache_fixture.hpp"
#include "replay/lru.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// An LRU list that counts what it is told to spare.
class Sparing final : public EvictionPolicy {
public:
    explicit Sparing(std::size_t& spared) : spared_(spared) {}
    void admit(const Admission& made) override { lru_.admit(made); }
    void touch(std::span<const EntryNumber> entries) override { lru_.touch(entries); }
    void spare(EntryNumber) override { spared_ += 1; }
    EntryNumber choose_victim() override { return lru_.choose_victim(); }
    void keep(EntryNumber entry) override { lru_.keep(entry); }
    void remove(EntryNumber entry, bool was_evicted) override { lru_.remove(entry, was_evicted); }

private:
    std::size_t& spared_;
    LruPolicy lru_;
};

}  // namespace

TEST(what_a_request_saves_behind_is_spared) {
    std::size_t spared = 0;
    CacheOptions options = small_options();
    options.policy = [&](PolicyBounds) { return std::make_unique<Sparing>(spared); };
    SmallCache cache(options);
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 3)), 3u);
    CHECK_EQUAL(spared, 0u);
    CHECK_EQUAL(cache.reserve(session, space, chain(1, 8)).size(), 8u);
    CHECK_EQUAL(spared, 3u);
}

TEST(a_session_reserves_at_most_its_limit) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session(5 * 4096);
    const std::vector<Ticket> tickets = cache.reserve(session, space, chain(1, 8));
    CHECK_EQUAL(tickets.size(), 5u);
    CHECK_EQUAL(cache->stats().refused, 1u);
    CHECK_EQUAL(cache->reservations().without_room(), 0u);
    CHECK_EQUAL(cache->reservations().abort(session, std::span(tickets).first(2)), 2u);
    CHECK_EQUAL(cache.reserve(session, space, chain(2, 8)).size(), 2u);
    CHECK(cache.reserve(0, space, chain(2, 8)).empty());
}

TEST(with_everything_leased_reservations_are_refused_until_something_is_released) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const std::size_t all = kSegmentBytes / 4096;
    std::vector<LeaseId> leases;
    for (std::uint64_t key = 0; key < all; ++key) {
        CHECK(cache.put_one(session, space, key));
        leases.push_back(cache.take(session, space, chain(key, 1))->lease);
    }
    CHECK(cache.reserve(session, space, chain(9999, 5)).empty());
    CHECK_EQUAL(cache->removals().evict(1), 0u);
    CHECK_EQUAL(cache->stats().refused, 1u);
    CHECK_EQUAL(cache->reservations().without_room(), 1u);
    CHECK_EQUAL(cache->stats().evicted, 0u);
    CHECK(cache->leases().release(session, leases[17]) && cache->leases().release(session, leases[18]));
    CHECK_EQUAL(cache.put(session, space, chain(9999, 5)), 2u);
    CHECK(!cache.has(space, 17) && !cache.has(space, 18) && cache.has(space, 16));
    CHECK_EQUAL(cache->stats().evicted, 2u);
}
