#include <array>
#include <cstdint>
#include <random>

#include "check.hpp"
#include "evict/prefix_classes.hpp"

using namespace kvo;

namespace {

// Uses until an entry is of the class, in the mean.
double mean_uses_to(EntryClass from, EntryClass kind) {
    constexpr int kTurns = 4096;
    std::mt19937_64 chances(1);
    std::uint64_t uses = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
        for (EntryClass now = from; now != kind; ++uses) {
            now = class_after_use(now, chances());
        }
    }
    return static_cast<double>(uses) / kTurns;
}

}  // namespace

TEST(uses_are_counted_in_steps_that_double) {
    for (const auto& [fresh, used, steps] :
         {std::array{kPrefixFresh, kPrefixUsed, kPrefixUses}, std::array{kPrefixBehind, kPrefixUsed, kPrefixUses},
          std::array{kPrefixStarted, kPrefixUsed, kPrefixUses}, std::array{kEndFresh, kEndUsed, kEndUses}}) {
        CHECK_EQUAL(class_after_use(fresh, 0), used);
        CHECK_EQUAL(class_after_use(fresh, 1), used);
        double expected = 1.0;
        for (int step = 1; step < steps; ++step) {
            expected += 1 << step;
            const double mean = mean_uses_to(fresh, static_cast<EntryClass>(used + step));
            CHECK(mean > 0.9 * expected && mean < 1.1 * expected);
        }
        CHECK_EQUAL(class_after_use(static_cast<EntryClass>(used + steps - 1), 0), used + steps - 1);
    }
}

TEST(an_end_that_was_passed_and_is_used_counts_on) {
    CHECK_EQUAL(class_when_passed(kEndFresh), kPassed);
    CHECK_EQUAL(class_after_use(kPassed, 0), kEndUsed);
    for (EntryClass step = 0; step < kEndUses; ++step) {
        const auto used = static_cast<EntryClass>(kEndUsed + step);
        for (const std::uint64_t chance : {0U, 1U, 7U}) {
            CHECK_EQUAL(class_after_use(class_when_passed(used), chance), class_after_use(used, chance));
        }
    }
}

TEST(a_run_is_classed_by_what_it_goes_on_from) {
    CHECK_EQUAL(run_class(kNoClass), kPrefixFresh);
    CHECK_EQUAL(run_class(kPrefixStarted), kPrefixFresh);
    CHECK_EQUAL(run_class(kPrefixUsed), kPrefixBehind);
    CHECK_EQUAL(run_class(kPrefixUsed + kPrefixUses - 1), kPrefixStarted);
    CHECK_EQUAL(run_class(kEndFresh), kPrefixFresh);
}

TEST(blocks_of_a_run_are_classed_by_steps_that_stay_among_their_own) {
    for (const auto& [first, end] : {std::array{kPrefixFresh, kPrefixBehind}, std::array{kPrefixBehind, kPrefixStarted},
                                     std::array{kPrefixStarted, kPrefixUsed}}) {
        CHECK_EQUAL(prefix_class(first, 1), first);
        CHECK_EQUAL(prefix_class(first, 1000), end - 1);
        for (std::uint32_t position = 1; position < 64; ++position) {
            CHECK(prefix_class(first, position) <= prefix_class(first, position + 1));
        }
    }
}
