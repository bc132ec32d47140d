#include "cache/held_shares.hpp"

#include <random>

#include "check.hpp"

using namespace kvo;

TEST(one_user_gets_three_quarters_and_the_next_one_three_quarters_of_the_rest) {
    HeldShares shares;
    std::uint64_t left = 1600;
    for (const auto& [owner, wanted] : {std::pair{1u, 1200u}, {2u, 300u}, {3u, 75u}}) {
        const Holding one{.bytes = 1, .entries = 0, .nodes = 0};
        const std::uint64_t allowed = shares.count_allowed(owner, one, 5000, {.bytes = left});
        CHECK_EQUAL(allowed, wanted);
        shares.add(owner, {.bytes = allowed});
        left -= allowed;
        CHECK_EQUAL(shares.count_allowed(owner, one, 1, {.bytes = left}), 0u);
        CHECK(!shares.may_hold(owner, one, {.bytes = left - 1}));
    }
}

TEST(every_resource_is_shared_out) {
    for (const Holding& scarce : {Holding{.bytes = 4}, Holding{.entries = 4}, Holding{.nodes = 4}}) {
        HeldShares shares;
        Holding left{.bytes = 1000, .entries = 1000, .nodes = 1000};
        left -= Holding{.bytes = 250 * scarce.bytes - scarce.bytes,
                        .entries = 250 * scarce.entries - scarce.entries,
                        .nodes = 250 * scarce.nodes - scarce.nodes};
        const Holding one{.bytes = 1, .entries = 1, .nodes = 1};
        CHECK_EQUAL(shares.count_allowed(1, one, 100, left), 3u);
    }
}

TEST(who_has_no_share_is_bounded_by_nothing) {
    HeldShares shares;
    shares.add(kNoOwner, {.bytes = 100});
    CHECK_EQUAL(shares.count_allowed(kNoOwner, {.bytes = 10}, 7, {}), 7u);
    CHECK(shares.may_hold(kNoOwner, {.bytes = 10}, {}));
    CHECK_EQUAL(shares.total().bytes, 100u);
}

TEST(what_sessions_without_an_owner_hold_takes_nothing_from_a_users_share) {
    HeldShares shares;
    shares.add(kNoOwner, {.bytes = 90});
    shares.add(1, {.bytes = 4});
    const Room room{.all = {.bytes = 100}, .left = {.bytes = 6}};
    CHECK_EQUAL(shares.left_by_users(room).bytes, 96u);
    CHECK_EQUAL(shares.count_allowed(1, {.bytes = 1}, 100, shares.left_by_users(room)), 71u);
    const Room after{.all = {.bytes = 100}, .left = {}};
    CHECK(shares.may_hold(1, {.bytes = 71}, shares.left_by_users(after, {.bytes = 71})));
    CHECK(!shares.may_hold(1, {.bytes = 72}, shares.left_by_users(after, {.bytes = 72})));
}

TEST(entries_that_users_hold_are_not_left_though_a_session_without_an_owner_holds_them_too) {
    HeldShares shares;
    shares.add(kNoOwner, {.bytes = 60});
    shares.add(1, {.bytes = 60});
    CHECK_EQUAL(shares.left_by_users({.all = {.bytes = 100}, .left = {.bytes = 40}}).bytes, 40u);
    // Two users hold the same 60 bytes.
    shares.add(2, {.bytes = 60});
    CHECK_EQUAL(shares.left_by_users({.all = {.bytes = 100}, .left = {.bytes = 40}}).bytes, 40u);
}

// Users take what they are allowed in any order, and give some back. Whenever one is given something, the rest is at
// least a third of what it has.
TEST(something_is_always_left_for_others) {
    std::mt19937 random(7);
    HeldShares shares;
    std::uint64_t left = 100'000;
    for (int step = 0; step < 20'000; ++step) {
        const auto owner = static_cast<OwnerNumber>(random() % 5);
        const Holding one{.bytes = 1 + random() % 50};
        if (random() % 3 == 0) {
            const Holding less{.bytes = shares.of(owner).bytes / 2};
            shares.subtract(owner, less);
            left += less.bytes;
            continue;
        }
        const std::uint64_t allowed = shares.count_allowed(owner, one, random() % 2000, {.bytes = left});
        shares.add(owner, {.bytes = allowed * one.bytes});
        left -= allowed * one.bytes;
        CHECK(left > 0 && left <= 100'000);
        CHECK(allowed == 0 || shares.of(owner).bytes <= 3 * left);
        CHECK_EQUAL(shares.total().bytes + left, 100'000u);
    }
}
