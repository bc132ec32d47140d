#include "service/byte_shares.hpp"

#include <optional>

#include "check.hpp"

using namespace kvo;

TEST(one_alone_gets_three_quarters_and_the_next_as_much_of_the_rest) {
    ByteShares shares(1600);
    CHECK(!shares.take("one", 1201));
    CHECK(shares.take("one", 1200));
    CHECK(!shares.take("one", 1));
    CHECK(!shares.take("two", 301));
    CHECK(shares.take("two", 300));
    CHECK(!shares.take("two", 1));
    CHECK(shares.take("three", 75));
    CHECK_EQUAL(shares.taken(), 1575u);
    shares.give_back("one", 1200);
    shares.give_back("three", 75);
    CHECK_EQUAL(shares.taken(), 300u);
    CHECK(shares.take("two", 900));
    CHECK(!shares.take("two", 1));
}

TEST(no_number_is_too_large_to_be_refused) {
    ByteShares shares(1600);
    CHECK(shares.take("one", 100));
    CHECK(!shares.take("one", UINT64_MAX));
    CHECK(!shares.take("two", UINT64_MAX - 100));
    shares.give_back("three", 100);  // who has nothing
    CHECK_EQUAL(shares.taken(), 100u);
}

TEST(a_share_becomes_more_or_less_and_ends_with_what_has_it) {
    ByteShares shares(1600);
    std::optional<ByteShare> share(std::in_place, shares, "one");
    CHECK(share->become(1000));
    CHECK(!share->become(1300));
    CHECK_EQUAL(shares.taken(), 1000u);
    CHECK(share->become(10));
    CHECK(share->become(10));
    CHECK_EQUAL(shares.taken(), 10u);
    const ByteShare other(shares, "one");
    share.reset();
    CHECK_EQUAL(shares.taken(), 0u);
}
