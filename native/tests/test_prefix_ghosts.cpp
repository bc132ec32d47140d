#include "check.hpp"
#include "evict/prefix_ghosts.hpp"

#include <cstdint>
#include <random>
#include <vector>

using namespace kvo;

namespace {

constexpr std::uint32_t kPlacesOfASet = 16;

void grow(PrefixGhosts& ghosts, std::uint64_t limit) {
    for (std::uint64_t at = 0; at <= limit; ++at) {
        ghosts.grow_to(at);
    }
}

}  // namespace

TEST(ghost_is_found_once_with_its_class_and_epoch) {
    PrefixGhosts ghosts;
    grow(ghosts, 4000);
    for (const std::uint64_t now : {std::uint64_t{700}, std::uint64_t{65536 + 40}, std::uint64_t{1} << 33}) {
        const auto epoch = static_cast<std::uint16_t>(now - 600);
        CHECK(!ghosts.add(5, 0xabcd0123, 26, epoch, now).is_found);
        CHECK(!ghosts.take(5, 0x7fff0123, now).is_found);
        const Ghost ghost = ghosts.take(5, 0xabcd0123, now + 3);
        CHECK(ghost.is_found);
        CHECK_EQUAL(ghost.kind, 26U);
        CHECK_EQUAL(ghost.epoch, epoch);
        CHECK(!ghosts.take(5, 0xabcd0123, now).is_found);
    }
}

TEST(oldest_ghost_of_a_set_makes_way) {
    PrefixGhosts ghosts;
    for (std::uint32_t at = 0; at < 3 * kPlacesOfASet; ++at) {
        const Ghost gone = ghosts.add(0, (at + 1) << 20, at % 27, static_cast<std::uint16_t>(at), 100);
        CHECK_EQUAL(gone.is_found, at >= kPlacesOfASet);
        CHECK(!gone.is_found || gone.epoch == at - kPlacesOfASet);
    }
    for (std::uint32_t at = 0; at < 3 * kPlacesOfASet; ++at) {
        CHECK_EQUAL(ghosts.take(0, (at + 1) << 20, 100).is_found, at >= 2 * kPlacesOfASet);
    }
}

TEST(ghosts_survive_growing) {
    PrefixGhosts ghosts;
    std::mt19937 random(7);
    std::vector<std::uint32_t> names;
    for (std::uint32_t at = 0; at < 4000; ++at) {
        ghosts.grow_to(std::uint64_t{at} * 16);
        names.push_back(static_cast<std::uint32_t>(random()));
        ghosts.add(names.back(), names.back(), 3, 9, 10);
    }
    std::size_t found = 0;
    for (const std::uint32_t name : names) {
        found += ghosts.take(name, name, 10).is_found ? 1 : 0;
    }
    CHECK(found > names.size() * 99 / 100);
}

TEST(ghosts_are_no_more_than_their_limit) {
    constexpr std::uint32_t kLimit = 1600;
    PrefixGhosts ghosts;
    grow(ghosts, kLimit);
    std::mt19937 random(11);
    std::vector<std::uint32_t> names(20 * kLimit);
    for (std::uint32_t& name : names) {
        name = static_cast<std::uint32_t>(random());
        ghosts.add(name, name, 1, 1, 1);
    }
    std::size_t found = 0;
    for (const std::uint32_t name : names) {
        found += ghosts.take(name, name, 1).is_found ? 1 : 0;
    }
    CHECK(found > kLimit * 9 / 10);
    CHECK(found <= kLimit + kPlacesOfASet);
}
