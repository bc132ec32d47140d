#include "check.hpp"
#include "evict/prefix_ages.hpp"

#include <map>
#include <vector>

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
