#include "evict/shadow_pool.hpp"

#include <map>
#include <random>

#include "check.hpp"
#include "evict/prefix_policy.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;

namespace {

ShadowPool make_pool(std::uint64_t capacity, std::string_view policy = "lru", EntryNumber entries = 1000) {
    return {find_policy(policy).value(), {.entry_limit = entries, .capacity_bytes = capacity}};
}

ShadowRecord block(std::uint64_t name, std::uint64_t parent = 0, std::uint64_t size_bytes = 1) {
    return {.name = name, .parent = parent, .size_bytes = size_bytes};
}

bool use(ShadowPool& pool, std::uint64_t name, std::uint64_t parent = 0) {
    pool.begin_request();
    return pool.use(block(name, parent));
}

}  // namespace

TEST(what_is_used_is_here_the_next_time) {
    ShadowPool pool = make_pool(2);
    CHECK(!use(pool, 1));
    CHECK(use(pool, 1));
    CHECK_EQUAL(pool.count(), 1U);
}

TEST(the_policy_says_what_makes_room) {
    ShadowPool pool = make_pool(2);
    use(pool, 1);
    use(pool, 2);
    use(pool, 1);
    use(pool, 3);
    CHECK(pool.holds(1) && !pool.holds(2) && pool.holds(3));
}

TEST(a_pool_has_bounds_in_bytes_and_in_records) {
    ShadowPool pool = make_pool(10, "lru", 2);
    for (std::uint64_t name = 1; name < 50; ++name) {
        use(pool, name);
        CHECK(pool.count() <= 2 && pool.used_bytes() <= 10);
    }
    pool.begin_request();
    CHECK(!pool.use(block(100, 0, 9)));
    CHECK_EQUAL(pool.used_bytes(), 10U);
    CHECK(!pool.use(block(101, 0, 11)));
    CHECK(!pool.holds(101));
}

TEST(what_a_request_uses_stays_until_the_next_one) {
    for (const std::string_view policy : {"lru", "prefix", "slru", "s3fifo", "arc"}) {
        ShadowPool pool = make_pool(3, policy);
        pool.begin_request();
        for (std::uint64_t name = 1; name <= 5; ++name) {
            CHECK(!pool.use(block(name, name - 1)));
        }
        CHECK(pool.holds(1) && pool.holds(2) && pool.holds(3) && !pool.holds(4));
        use(pool, 7);
        CHECK(pool.holds(7));
    }
}

TEST(what_was_brought_for_a_use_is_no_hit_at_that_use) {
    ShadowPool pool = make_pool(4);
    pool.begin_request();
    pool.bring(block(1), true);
    pool.bring(block(2), false);
    CHECK(!use(pool, 1));
    CHECK(use(pool, 1));
    CHECK(use(pool, 2));
    pool.bring(block(2), true);
    CHECK(use(pool, 2));
}

TEST(what_was_removed_is_unknown) {
    ShadowPool pool = make_pool(4, "prefix");
    pool.begin_request();
    pool.use(block(1));
    pool.use(block(2, 1));
    pool.use(block(2, 1));
    pool.remove(1);
    pool.remove(1);
    CHECK(!pool.holds(1) && pool.holds(2));
    pool.remove(2);
    CHECK_EQUAL(pool.count(), 0U);
    CHECK_EQUAL(pool.used_bytes(), 0U);
}

TEST(names_that_look_alike_are_told_apart) {
    ShadowPool pool = make_pool(1 << 20, "lru", 1 << 16);
    std::map<std::uint64_t, bool> known;
    std::mt19937_64 random(3);
    for (int step = 0; step < 20000; ++step) {
        const std::uint64_t name = (random() % 600) << 52 | random() % 2;
        if (random() % 3 == 0) {
            pool.remove(name);
            known[name] = false;
        } else {
            CHECK_EQUAL(use(pool, name), known[name]);
            known[name] = true;
        }
    }
    for (const auto& [name, is_known] : known) {
        CHECK_EQUAL(pool.holds(name), is_known);
    }
}
