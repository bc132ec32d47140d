#include "check.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "evict/prefix_reuse.hpp"

using namespace kvo;

TEST(age_buckets_follow_each_other_and_hold_their_first_age) {
    for (std::size_t bucket = 0; bucket < AgeBuckets::kCount; ++bucket) {
        CHECK_EQUAL(AgeBuckets::bucket_of(AgeBuckets::first_age(bucket)), bucket);
        CHECK(AgeBuckets::first_age(bucket) < AgeBuckets::first_age(bucket + 1));
    }
    for (std::uint32_t age = 1; age < 70000; ++age) {
        const std::size_t step = AgeBuckets::bucket_of(age) - AgeBuckets::bucket_of(age - 1);
        CHECK(step <= 1);
    }
}

// Against the plain way: all epochs ever, and in which slot merging has put each.
TEST(ladder_finds_every_epoch_where_merging_has_put_it) {
    AgeLadder ages;
    std::map<std::uint64_t, std::size_t> slots;
    slots[0] = ages.slot_of(0);
    for (std::uint64_t now = 1; now < 3000; ++now) {
        ages.advance([&](std::size_t from, std::size_t into) {
            CHECK(from != into);
            for (auto& [epoch, slot] : slots) {
                slot = slot == from ? into : slot;
            }
        });
        CHECK_EQUAL(ages.now(), now);
        slots[now] = ages.slot_of(static_cast<std::uint16_t>(now));
        if (now % 37 != 0 && now > 300) {
            continue;
        }
        for (const auto& [epoch, slot] : slots) {
            CHECK_EQUAL(ages.slot_of(static_cast<std::uint16_t>(epoch)), slot);
        }
    }
}

TEST(ladder_visits_each_slot_once_newest_first_with_an_age_near_its_entries) {
    AgeLadder ages;
    for (int step = 0; step < 5000; ++step) {
        ages.advance([](std::size_t, std::size_t) {});
    }
    std::map<std::size_t, std::uint32_t> seen;
    std::uint32_t before = 0;
    ages.each_slot([&](std::size_t slot, std::uint32_t age) {
        CHECK(seen.emplace(slot, age).second);
        CHECK(seen.size() == 1 || age > before);
        before = age;
    });
    for (std::uint32_t age = 0; age <= 5000; ++age) {
        const auto found = seen.find(ages.slot_of(static_cast<std::uint16_t>(ages.now() - age)));
        CHECK(found != seen.end());
        const std::uint32_t off = found->second > age ? found->second - age : age - found->second;
        CHECK(off <= 1 + age / 8);
    }
}

TEST(ladder_goes_on_when_epochs_no_longer_fit_sixteen_bits) {
    AgeLadder ages;
    std::vector<int> entries(AgeLadder::kSlots);
    for (int step = 0; step < 140000; ++step) {
        entries[ages.slot_of(static_cast<std::uint16_t>(ages.now()))] += 1;
        ages.advance([&](std::size_t from, std::size_t into) {
            entries[into] += entries[from];
            entries[from] = 0;
        });
    }
    int total = 0;
    ages.each_slot([&](std::size_t slot, std::uint32_t) { total += entries[slot]; });
    CHECK_EQUAL(total, 140000);
}

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

namespace {

constexpr EntryClass kSome = kPrefixFresh;
constexpr EntryClass kOther = kPrefixUsed;

// `uses` of class `kind` at `age`, `losses` much later.
void count(ReuseTable& table, EntryClass kind, int uses, std::uint32_t age, int losses) {
    for (int at = 0; at < uses; ++at) {
        table.count_use(kind, age);
    }
    for (int at = 0; at < losses; ++at) {
        table.count_loss(kind, 4096);
    }
}

}  // namespace

TEST(untaught_table_values_the_young_like_an_lru_list) {
    ReuseTable table;
    table.estimate({});
    for (EntryClass kind = 0; kind < kClassCount; ++kind) {
        for (std::uint32_t age = 4; age < 10000; age *= 2) {
            CHECK(table.value(kind, age) > table.value(kind, 2 * age));
            if (!is_used_prefix(kind) && !is_used_end(kind)) {
                CHECK_EQUAL(table.value(kind, age), table.value(kSome, age));
            }
        }
    }
}

// All policies but the list of the least recently used assume this, until the traffic shows otherwise.
TEST(untaught_table_prefers_what_was_used) {
    ReuseTable table;
    table.estimate({});
    for (std::uint32_t age = 4; age < 10000; age *= 2) {
        CHECK(table.value(kPrefixUsed, age) > table.value(kPrefixBehind, age));
        CHECK(table.value(kPrefixUsed + 1, age) > table.value(kPrefixUsed, age));
        CHECK_EQUAL(table.value(kPrefixUsed + 2, age), table.value(kPrefixUsed + 1, age));
        CHECK(table.value(kEndUsed, age) > table.value(kEndFresh, age));
    }
}

TEST(class_used_more_often_is_worth_more) {
    ReuseTable table;
    count(table, kSome, 100, 30, 9900);
    count(table, kOther, 5000, 30, 5000);
    table.estimate({});
    for (const std::uint32_t age : {0U, 4U, 16U, 24U}) {
        CHECK(table.value(kOther, age) > 5 * table.value(kSome, age));
    }
}

TEST(value_rises_towards_the_age_of_reuse_and_falls_behind_it) {
    ReuseTable table;
    count(table, kSome, 8000, 100, 2000);
    table.estimate({});
    CHECK(table.value(kSome, 48) > 1.5 * table.value(kSome, 0));
    CHECK(table.value(kSome, 100) > 1.5 * table.value(kSome, 48));
    CHECK(table.value(kSome, 400) < 0.1 * table.value(kSome, 100));
}

// Entries of one class go oldest first, also where ages share a bucket, and those of two are compared by their ages.
TEST(values_of_ages_in_one_bucket_differ) {
    ReuseTable table;
    count(table, kSome, 500, 10, 9500);
    table.estimate({});
    for (std::uint32_t age = 64; age < 127; ++age) {
        CHECK(table.value(kSome, age) > table.value(kSome, age + 1));
    }
}

// Few uses fall into this bucket or the next by accident; of many each bucket tells apart.
TEST(buckets_that_saw_little_are_judged_with_their_neighbours) {
    const auto next_to_seen = [](int entries) {
        ReuseTable table;
        count(table, kSome, entries / 2, 100, entries / 2);
        table.estimate({});
        return table.value(kSome, 128) / table.value(kSome, 96);
    };
    CHECK(next_to_seen(200) > 0.1);
    CHECK(next_to_seen(20000) < 0.02);
}

// Those still waiting lower the chance: they came that far and were not used.
TEST(followed_entries_count_as_far_as_they_came) {
    ReuseTable table;
    count(table, kSome, 500, 100, 500);
    table.estimate({});
    const double before = table.value(kSome, 100);
    ReuseTable::Grid followed{};
    followed[kSome][AgeBuckets::bucket_of(20)] = 100000.0;
    table.estimate(followed);
    CHECK(table.value(kSome, 100) > 0.8 * before);
    followed[kSome][AgeBuckets::bucket_of(1000)] = 100000.0;
    table.estimate(followed);
    CHECK(table.value(kSome, 100) < 0.1 * before);
}

TEST(little_seen_class_takes_the_shape_of_all) {
    ReuseTable table;
    count(table, kSome, 5000, 100, 5000);
    count(table, kOther, 1, 700, 1);
    table.estimate({});
    CHECK(table.value(kOther, 100) > 2 * table.value(kOther, 700));
}

// They say less than the blocks of the same boundaries, so what happened to them alone is taken for chance.
TEST(few_ends_of_many_blocks_keep_to_the_common_shape) {
    const auto value_of_end = [](int blocks) {
        ReuseTable table;
        count(table, kSome, blocks, 100, blocks);
        count(table, kEndFresh, 0, 100, 200);
        table.estimate({});
        return table.value(kEndFresh, 100) / table.value(kSome, 100);
    };
    CHECK(value_of_end(20000) > 3 * value_of_end(100));
}

// States are the only ends whose blocks have no class: each class is judged by itself.
TEST(ends_without_blocks_are_judged_by_themselves) {
    ReuseTable table;
    count(table, kEndFresh, 100, 30, 9900);
    count(table, kEndUsed, 5000, 30, 5000);
    table.estimate({});
    CHECK(table.value(kEndUsed, 24) > 5 * table.value(kEndFresh, 24));
}

TEST(faded_past_gives_way_to_the_present) {
    ReuseTable table;
    count(table, kSome, 9000, 20, 1000);
    for (int at = 0; at < 12; ++at) {
        table.fade();
    }
    count(table, kSome, 10, 20, 990);
    count(table, kOther, 500, 20, 500);
    table.estimate({});
    CHECK(table.value(kSome, 20) < 0.2 * table.value(kOther, 20));
}
