#include "cache/removals.hpp"

#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

TEST(clear_forgets_one_namespace) {
    SmallCache cache;
    const Space first = cache.open(hybrid_geometry(), 1);
    const Space second = cache.open(plain_geometry(), 2);
    const SessionId session = cache.session();
    for (std::uint32_t group = 0; group < 5; ++group) {
        CHECK_EQUAL(cache.put(session, first + group, chain(1, 2)), 2u);
    }
    CHECK_EQUAL(cache.put(session, second, chain(1, 2)), 2u);
    const std::vector<Ticket> reserved = cache.reserve(session, first, chain(2, 1));
    CHECK_EQUAL(cache->removals().clear(namespace_of(first)), 10u);
    CHECK_EQUAL(cache->removals().clear(namespace_of(first)), 0u);
    CHECK_EQUAL(cache->removals().clear(77), 0u);
    CHECK_EQUAL(cache.count_readable(first, chain(1, 2)), 0u);
    CHECK_EQUAL(cache.count_readable(second, chain(1, 2)), 2u);
    CHECK_EQUAL(cache->stats().reserved, 1u);
    CHECK_EQUAL(cache->stats().evicted, 0u);
}
