#include "check.hpp"

#include <cstdint>
#include <random>
#include <vector>

#include "evict/prefix_queues.hpp"

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

namespace {

struct Queues {
    Queues() { nodes.grow_to(99); }

    void rank() {
        queues.rank(ages, [](EntryClass kind, std::uint32_t age) { return 10.0 * kind - age; });
    }

    std::vector<EntryNumber> drain() {
        std::vector<EntryNumber> order;
        for (EntryNumber entry = queues.choose(); entry != kNoEntry; entry = queues.choose()) {
            CHECK_EQUAL(queues.choose(), entry);
            queues.unlink(entry);
            order.push_back(entry);
        }
        return order;
    }

    PrefixNodes nodes;
    PrefixQueues queues{nodes};
    AgeLadder ages;
};

std::size_t slot_now(const AgeLadder& ages) { return ages.slot_of(static_cast<std::uint16_t>(ages.now())); }

}  // namespace

TEST(lowest_value_goes_first_and_in_a_list_its_oldest_end) {
    Queues at;
    at.rank();
    at.queues.push(1, 2, slot_now(at.ages), QueueEnd::newest);
    at.queues.push(2, 1, slot_now(at.ages), QueueEnd::newest);
    at.queues.push(3, 1, slot_now(at.ages), QueueEnd::newest);
    at.queues.push(4, 1, slot_now(at.ages), QueueEnd::oldest);
    at.rank();
    CHECK(at.drain() == std::vector<EntryNumber>({4, 2, 3, 1}));
}

TEST(what_a_tier_has_counts_less_and_stays_apart_while_steps_merge) {
    Queues at;
    for (const EntryNumber entry : {1U, 2U, 3U, 4U}) {
        at.nodes[entry].is_in_tier = entry > 2;
        at.queues.push(entry, entry % 2 == 0 ? 1 : 2, slot_now(at.ages), QueueEnd::newest);
    }
    // Classes 1 and 2 are worth 10 and 20, in a tier 3 and 6.
    at.queues.rank(at.ages, [](EntryClass kind, std::uint32_t) { return 10.0 * kind; });
    CHECK_EQUAL(at.queues.choose(), 4U);
    for (int epoch = 0; epoch < 100; ++epoch) {
        at.ages.advance([&](std::size_t from, std::size_t into) { at.queues.merge(from, into); });
    }
    at.queues.rank(at.ages, [](EntryClass kind, std::uint32_t) { return 10.0 * kind; });
    CHECK(at.drain() == std::vector<EntryNumber>({4, 3, 2, 1}));
}

TEST(entry_pushed_after_ranking_is_in_its_place) {
    Queues at;
    at.queues.push(1, 1, slot_now(at.ages), QueueEnd::newest);
    at.queues.push(2, 3, slot_now(at.ages), QueueEnd::newest);
    at.queues.push(3, 2, slot_now(at.ages), QueueEnd::newest);
    at.queues.unlink(3);
    at.rank();
    CHECK_EQUAL(at.queues.choose(), 1U);
    at.queues.unlink(1);
    CHECK_EQUAL(at.queues.choose(), 2U);
    at.queues.push(3, 2, slot_now(at.ages), QueueEnd::newest);
    CHECK_EQUAL(at.queues.choose(), 3U);
    at.queues.push(1, 1, slot_now(at.ages), QueueEnd::newest);
    CHECK(at.drain() == std::vector<EntryNumber>({1, 3, 2}));
}

TEST(kept_ones_go_when_there_is_no_other) {
    Queues at;
    at.queues.push_kept(5);
    at.queues.push_kept(6);
    at.queues.push(1, 1, slot_now(at.ages), QueueEnd::newest);
    at.rank();
    CHECK(at.drain() == std::vector<EntryNumber>({1, 5, 6}));
    CHECK_EQUAL(at.queues.first_kept(), kNoEntry);
}

TEST(first_entry_of_a_class_asks_for_ranks) {
    Queues at;
    at.rank();
    CHECK(at.queues.is_ranked());
    at.queues.push(1, 4, slot_now(at.ages), QueueEnd::newest);
    CHECK(!at.queues.is_ranked());
    at.rank();
    at.queues.push(2, 4, slot_now(at.ages), QueueEnd::newest);
    CHECK(at.queues.is_ranked());
}

// One entry an epoch, of two classes in turn: whatever merges, all stay, the oldest of a class first.
TEST(entries_stay_in_order_of_age_while_steps_merge) {
    Queues at;
    for (EntryNumber entry = 0; entry < 100; ++entry) {
        at.queues.push(entry, static_cast<EntryClass>(entry % 2), slot_now(at.ages), QueueEnd::newest);
        at.ages.advance([&](std::size_t from, std::size_t into) { at.queues.merge(from, into); });
    }
    at.queues.rank(at.ages, [](EntryClass kind, std::uint32_t age) { return 1000.0 * kind - age; });
    const std::vector<EntryNumber> order = at.drain();
    CHECK_EQUAL(order.size(), 100U);
    for (EntryNumber place = 0; place < 100; ++place) {
        CHECK_EQUAL(order[place], place < 50 ? 2 * place : 2 * (place - 50) + 1);
    }
}
