#include "check.hpp"
#include "evict/prefix_reuse.hpp"

using namespace kvo;

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
