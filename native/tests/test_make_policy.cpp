#include "replay/make_policy.hpp"

#include <algorithm>

#include "check.hpp"
#include "policy_driver.hpp"

using namespace kvo;
using namespace kvo::test;

TEST(every_name_makes_a_policy_of_its_own) {
    for (const std::string_view name : policy_names()) {
        auto made = make_policy(name, {8, 8});
        CHECK(made.ok());
        made.value()->admit(admission('a'));
        CHECK_EQUAL(made.value()->choose_victim(), EntryNumber{0});
        CHECK_EQUAL(make_policy(name, {8, 8}).value()->choose_victim(), kNoEntry);
    }
}

TEST(the_classics_are_known) {
    const auto names = policy_names();
    for (const std::string_view name : {"lru", "slru", "s3fifo", "arc"}) {
        CHECK(std::ranges::find(names, name) != names.end());
    }
}

TEST(an_unknown_name_is_told_the_known_ones) {
    for (const std::string_view name : {"", "LRU", "lru ", "belady"}) {
        const auto made = make_policy(name, {8, 8});
        CHECK(!made.ok());
        CHECK(made.fault().code() == Code::invalid);
        for (const std::string_view known : policy_names()) {
            CHECK(made.fault().message().find(known) != std::string::npos);
        }
    }
}

// Whichever entries are leased, the others are offered soon: no policy hides them behind entries it was told to keep.
TEST(every_policy_passes_leased_entries) {
    constexpr EntryNumber kEntries = 40;
    for (const std::string_view name : policy_names()) {
        for (EntryNumber free_entry = 0; free_entry < kEntries; ++free_entry) {
            auto made = make_policy(name, {kEntries, kEntries});
            EvictionPolicy& policy = *made.value();
            for (EntryNumber entry = 0; entry < kEntries; ++entry) {
                Admission admitted = admission('a');
                admitted.entry = entry;
                admitted.name = entry;
                policy.admit(admitted);
                const EntryNumber used[] = {entry};
                for (EntryNumber use = 0; use < entry % 4; ++use) {
                    policy.touch(used);
                }
            }
            EntryNumber kept = 0;
            for (; policy.choose_victim() != free_entry; ++kept) {
                CHECK(kept < 2 * kEntries);
                policy.keep(policy.choose_victim());
            }
        }
    }
}
