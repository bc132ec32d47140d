#include "cache/departures.hpp"

#include <random>

#include "check.hpp"

using namespace kvo;

namespace {

// Like names of blocks: any bits.
std::uint64_t name_of(std::uint64_t number) {
    std::mt19937_64 random(number);
    return random();
}

}  // namespace

TEST(tells_what_it_was_told_last) {
    Departures departures(64);
    CHECK(!departures.find(name_of(1)));
    departures.add(name_of(1), {Leaving::evicted, 5, 4096});
    departures.add(name_of(2), {Leaving::cleared, 6, 0});
    departures.add(name_of(1), {Leaving::untrusted, 7, 8192});
    const auto found = departures.find(name_of(1));
    CHECK(found.has_value());
    CHECK(found->why == Leaving::untrusted);
    CHECK_EQUAL(found->second, 7U);
    CHECK_EQUAL(found->evicted_bytes, 8192U);
    CHECK(departures.find(name_of(2))->why == Leaving::cleared);
    CHECK(!departures.find(name_of(3)));
}

TEST(the_oldest_of_a_set_gives_way) {
    Departures departures(4);  // one set
    for (std::uint64_t number = 1; number <= 6; ++number) {
        departures.add(name_of(number), {Leaving::evicted, 0, number});
    }
    for (std::uint64_t number = 1; number <= 6; ++number) {
        CHECK_EQUAL(departures.find(name_of(number)).has_value(), number > 2);
    }
}

TEST(names_that_are_alike_in_most_bits_are_told_apart) {
    Departures departures(1 << 12);
    for (std::uint64_t number = 0; number < 1000; ++number) {
        departures.add(number << 40, {Leaving::evicted, static_cast<std::uint32_t>(number), number + 1});
    }
    std::size_t found = 0;
    for (std::uint64_t number = 0; number < 1000; ++number) {
        const auto one = departures.find(number << 40);
        if (one) {
            CHECK_EQUAL(one->second, static_cast<std::uint32_t>(number));
            ++found;
        }
    }
    CHECK(found > 900);
    CHECK(!departures.find(std::uint64_t{1000} << 40));
}

TEST(most_of_what_fits_is_remembered) {
    constexpr std::size_t kCount = 1 << 14;
    Departures departures(kCount);
    for (std::uint64_t number = 1; number <= kCount / 2; ++number) {
        departures.add(name_of(number), {Leaving::evicted, 0, number});
    }
    std::size_t found = 0;
    for (std::uint64_t number = 1; number <= kCount / 2; ++number) {
        found += departures.find(name_of(number)).has_value();
    }
    CHECK(found > kCount / 2 * 19 / 20);
}
