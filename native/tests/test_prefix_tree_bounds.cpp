// Bounds of the work that a publishing engine can cause: entries visited, for any order and any parents.
#include "check.hpp"
#include "evict/prefix_policy.hpp"
#include "policy_driver.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

using namespace kvo;
using kvo::test::evict_some;

namespace {

constexpr EntryNumber kLong = 3000;
constexpr std::uint32_t kWindow = 2;

// Blocks [0, kLong) of one sequence, the last one first, so that none knows its parent.
void admit_backwards(PrefixPolicy& policy) {
    for (EntryNumber at = kLong; at-- > 0;) {
        policy.admit({.entry = at, .parent = kNoEntry, .name = at * 0x9e3779b97f4a7c15, .size_bytes = 1});
    }
}

std::vector<EntryNumber> numbers_to(EntryNumber end) {
    std::vector<EntryNumber> entries(end);
    for (EntryNumber at = 0; at < end; ++at) {
        entries[at] = at;
    }
    return entries;
}

}  // namespace

TEST(a_sequence_published_backwards_finds_its_order_without_a_walk) {
    PrefixPolicy policy({10000, 10000});
    admit_backwards(policy);
    policy.touch(numbers_to(kLong));
    CHECK_EQUAL(policy.walked(), 0u);
    const std::vector<EntryNumber> victims = evict_some(policy, kLong);
    CHECK(std::ranges::is_sorted(victims, std::greater{}));
}

TEST(a_touch_visits_a_bounded_number_of_entries_for_each_of_its_own) {
    PrefixPolicy policy({10000, 10000});
    admit_backwards(policy);
    // Each entry has a child, so the policy cannot tell at once that it is not an ancestor.
    for (EntryNumber at = 0; at < kLong; ++at) {
        policy.admit({.entry = kLong + at, .parent = at, .name = at + 1, .size_bytes = 1});
    }
    for (std::uint64_t touches = 1; touches <= 3; ++touches) {
        policy.touch(numbers_to(kLong));
        CHECK(policy.walked() <= touches * kLong * 16);
    }
    // Entries that did not find their place are evicted all the same, children before parents where they are known.
    const std::vector<EntryNumber> victims = evict_some(policy, 2 * kLong);
    CHECK_EQUAL(policy.choose_victim(), kNoEntry);
    for (EntryNumber at = 0; at < kLong; ++at) {
        CHECK(std::ranges::find(victims, at) > std::ranges::find(victims, kLong + at));
    }
}

TEST(what_hangs_on_one_block_costs_no_more_than_the_groups_of_a_model) {
    for (const Reuse reuse : {Reuse::window, Reuse::exact}) {
        for (const bool needs_state : {false, true}) {
            PrefixPolicy policy({10000, 10000});
            policy.admit({.entry = 0, .parent = kNoEntry, .name = 1, .size_bytes = 1, .needs_state = needs_state});
            for (EntryNumber at = 1; at <= kLong; ++at) {
                policy.admit({.entry = at,
                              .parent = 0,
                              .name = at * 0x9e3779b97f4a7c15,
                              .size_bytes = 1,
                              .reuse = reuse,
                              .window_blocks = reuse == Reuse::window ? kWindow : 0,
                              .group = at});
            }
            policy.touch(numbers_to(kLong + 1));
            for (EntryNumber at = 1; at < kLong / 2; ++at) {
                policy.remove(at, false);
            }
            evict_some(policy, kLong / 2 + 2);
            CHECK_EQUAL(policy.choose_victim(), kNoEntry);
            CHECK(policy.walked() <= kLong * 4 * 128);
        }
    }
}

TEST(a_window_longer_than_any_models_costs_what_a_long_one_does) {
    constexpr EntryNumber kBlocks = 6000;
    for (const bool needs_state : {false, true}) {
        PrefixPolicy policy({100000, 100000});
        for (EntryNumber at = 0; at < kBlocks; ++at) {
            policy.admit({.entry = 2 * at,
                          .parent = at == 0 ? kNoEntry : 2 * at - 2,
                          .name = at * 0x9e3779b97f4a7c15,
                          .size_bytes = 1,
                          .needs_state = needs_state});
            policy.admit({.entry = 2 * at + 1,
                          .parent = 2 * at,
                          .name = at * 0x8bb84b93962eacc9,
                          .size_bytes = 1,
                          .reuse = needs_state && at > 0 ? Reuse::exact : Reuse::window,
                          .window_blocks = 1u << 30,
                          .group = 1});
        }
        evict_some(policy, 2 * kBlocks);
        CHECK(policy.walked() <= std::uint64_t{kBlocks} * 2 * 1200);
    }
}
