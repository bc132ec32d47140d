#include "check.hpp"
#include "evict/prefix_policy.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <unordered_map>
#include <vector>

using namespace kvo;

namespace {

constexpr std::uint64_t kBytes = 4096;

// A cache of blocks of equal size, and nothing but the policy to say what goes.
class Blocks {
public:
    explicit Blocks(EntryNumber limit) : policy_({limit, limit * kBytes}) {
        for (EntryNumber entry = limit; entry-- > 0;) {
            free_.push_back(entry);
        }
    }

    // A request for blocks by name. Returns how many were served.
    std::size_t request(const std::vector<std::uint64_t>& names) {
        std::vector<EntryNumber> hits;
        while (hits.size() < names.size() && residents_.contains(names[hits.size()])) {
            hits.push_back(residents_[names[hits.size()]]);
        }
        policy_.touch(hits);
        while (free_.size() < names.size() - hits.size()) {
            const EntryNumber victim = policy_.choose_victim();
            if (std::ranges::find(hits, victim) != hits.end()) {
                policy_.keep(victim);
                continue;
            }
            evict(victim);
        }
        EntryNumber parent = hits.empty() ? kNoEntry : hits.back();
        for (std::size_t at = hits.size(); at < names.size(); ++at) {
            const EntryNumber entry = free_.back();
            free_.pop_back();
            names_[entry] = names[at];
            residents_[names[at]] = entry;
            policy_.admit(
                {.entry = entry, .parent = parent, .name = names[at] * 0x9e3779b97f4a7c15, .size_bytes = kBytes});
            parent = entry;
        }
        return hits.size();
    }

    const std::vector<EntryNumber>& victims() const { return victims_; }

private:
    void evict(EntryNumber victim) {
        CHECK(names_.contains(victim));
        policy_.remove(victim, true);
        residents_.erase(names_[victim]);
        names_.erase(victim);
        free_.push_back(victim);
        victims_.push_back(victim);
    }

    PrefixPolicy policy_;
    std::unordered_map<std::uint64_t, EntryNumber> residents_;
    std::map<EntryNumber, std::uint64_t> names_;
    std::vector<EntryNumber> free_;
    std::vector<EntryNumber> victims_;
};

std::vector<std::uint64_t> chain(std::uint64_t first, std::size_t length) {
    std::vector<std::uint64_t> names(length);
    for (std::size_t at = 0; at < length; ++at) {
        names[at] = first + at;
    }
    return names;
}

}  // namespace

TEST(empty_policy_has_no_victim) {
    PrefixPolicy policy({10, 10 * kBytes});
    CHECK_EQUAL(policy.choose_victim(), kNoEntry);
    policy.touch({});
    CHECK_EQUAL(policy.choose_victim(), kNoEntry);
}

TEST(sequence_goes_from_its_end) {
    PrefixPolicy policy({100, 100 * kBytes});
    for (EntryNumber entry = 0; entry < 20; ++entry) {
        policy.admit(
            {.entry = entry, .parent = entry == 0 ? kNoEntry : entry - 1, .name = entry, .size_bytes = kBytes});
    }
    for (EntryNumber entry = 20; entry-- > 0;) {
        CHECK_EQUAL(policy.choose_victim(), entry);
        CHECK_EQUAL(policy.choose_victim(), entry);
        policy.remove(entry, true);
    }
    CHECK_EQUAL(policy.choose_victim(), kNoEntry);
}

TEST(untaught_policy_evicts_the_least_recently_used) {
    PrefixPolicy policy({640, 640 * kBytes});
    for (EntryNumber entry = 0; entry < 640; ++entry) {
        policy.admit({.entry = entry, .name = entry, .size_bytes = kBytes});
    }
    std::uint32_t out_of_order = 0;
    for (EntryNumber place = 0; place < 600; ++place) {
        const EntryNumber victim = policy.choose_victim();
        out_of_order += victim > place + 80 || place > victim + 80 ? 1 : 0;
        policy.remove(victim, true);
    }
    CHECK(out_of_order < 60);
}

TEST(what_a_tier_has_goes_before_what_is_alike) {
    PrefixPolicy policy({100, 100 * kBytes});
    for (EntryNumber entry = 0; entry < 20; ++entry) {
        policy.admit({.entry = entry, .name = entry, .size_bytes = kBytes});
    }
    policy.note_tier(17, true);
    policy.note_tier(18, true);
    policy.note_tier(18, true);
    policy.note_tier(19, true);
    policy.note_tier(19, false);
    const std::vector<EntryNumber> hits{17};
    policy.touch(hits);  // what it is known by stays
    for (const EntryNumber expected : {18U, 17U, 0U}) {
        CHECK_EQUAL(policy.choose_victim(), expected);
        policy.remove(expected, true);
    }
    // Its number is another's now.
    policy.admit({.entry = 18, .name = 98, .size_bytes = kBytes});
    CHECK_EQUAL(policy.choose_victim(), 1U);
}

TEST(an_entry_that_goes_first_has_the_lowest_value) {
    PrefixPolicy policy({100, 100 * kBytes});
    for (EntryNumber entry = 0; entry < 60; ++entry) {
        policy.admit({.entry = entry, .name = entry, .size_bytes = kBytes});
    }
    for (int hits = 0; hits < 3; ++hits) {
        policy.touch(std::vector<EntryNumber>{7});
    }
    const auto is_least = [&](EntryNumber victim) {
        for (EntryNumber entry = 0; entry < 60; ++entry) {
            if (entry != victim && policy.value_of(entry) < policy.value_of(victim)) {
                return false;
            }
        }
        return true;
    };
    // Nothing was evicted yet, so only the time of the last use counts.
    CHECK(policy.value_of(7) > policy.value_of(0));
    CHECK(is_least(policy.choose_victim()));
    CHECK(policy.value_of(7) > policy.value_of(policy.choose_victim()));
    policy.remove(0, true);
    CHECK(policy.value_of(0) < policy.value_of(1));  // nothing is known of it
}

TEST(a_block_that_others_need_stays_though_a_tier_has_it) {
    PrefixPolicy policy({100, 100 * kBytes});
    for (EntryNumber entry = 0; entry < 3; ++entry) {
        policy.admit(
            {.entry = entry, .parent = entry == 0 ? kNoEntry : entry - 1, .name = entry, .size_bytes = kBytes});
    }
    policy.note_tier(0, true);
    for (const EntryNumber expected : {2U, 1U, 0U}) {
        CHECK_EQUAL(policy.choose_victim(), expected);
        policy.remove(expected, true);
    }
}

TEST(kept_victim_makes_way_for_all_others_though_a_tier_has_it) {
    PrefixPolicy policy({1000, 1000 * kBytes});
    for (EntryNumber entry = 0; entry < 4; ++entry) {
        policy.admit({.entry = entry, .name = entry, .size_bytes = kBytes});
    }
    const EntryNumber kept = policy.choose_victim();
    policy.keep(kept);
    policy.note_tier(kept, true);
    for (int others = 3; others > 0; --others) {
        CHECK(policy.choose_victim() != kept);
        policy.remove(policy.choose_victim(), true);
    }
    CHECK_EQUAL(policy.choose_victim(), kept);
    // The note that a tier has the entry counts when it is no longer kept.
    for (EntryNumber entry = 10; entry < 90; ++entry) {
        policy.admit({.entry = entry, .name = entry, .size_bytes = kBytes});
    }
    CHECK_EQUAL(policy.choose_victim(), kept);
}

TEST(kept_victim_makes_way_for_all_others) {
    PrefixPolicy policy({10, 10 * kBytes});
    for (EntryNumber entry = 0; entry < 4; ++entry) {
        policy.admit({.entry = entry, .name = entry, .size_bytes = kBytes});
    }
    std::vector<EntryNumber> kept;
    for (int at = 0; at < 4; ++at) {
        const EntryNumber victim = policy.choose_victim();
        CHECK(std::ranges::find(kept, victim) == kept.end());
        kept.push_back(victim);
        policy.keep(victim);
    }
    CHECK_EQUAL(policy.choose_victim(), kept[0]);
    policy.touch(std::vector<EntryNumber>{kept[0]});
    CHECK_EQUAL(policy.choose_victim(), kept[0]);
    policy.remove(kept[0], true);
    CHECK_EQUAL(policy.choose_victim(), kept[1]);
}

// Each document comes twice, and what stands behind it the second time never again: a list of the least recently used
// would have to be half as large again to hold the documents until then.
TEST(questions_make_way_for_documents_that_come_again) {
    constexpr std::uint64_t kApart = 60;
    constexpr std::size_t kLength = 4;
    Blocks cache(kApart * 2 * kLength - 100);
    std::size_t hits = 0;
    constexpr std::uint64_t kRounds = 4000;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
        const std::size_t first = cache.request(chain(round * 100, kLength));
        CHECK_EQUAL(first, 0u);
        if (round >= kApart) {
            std::vector<std::uint64_t> asked = chain((round - kApart) * 100, kLength);
            const std::vector<std::uint64_t> question = chain((round - kApart) * 100 + 50, kLength);
            asked.insert(asked.end(), question.begin(), question.end());
            const std::size_t second = cache.request(asked);
            hits += round >= kRounds / 2 ? second : 0;
        }
    }
    CHECK(hits > kRounds / 2 * kLength * 9 / 10);
}

// Hot sequences between blocks that never come again: once that is learned, hardly any of the hot ones go.
TEST(scan_does_not_push_out_what_is_used_again) {
    Blocks cache(1000);
    std::mt19937_64 random(3);
    std::uint64_t fresh = 1'000'000;
    std::size_t served = 0;
    std::size_t asked = 0;
    for (int round = 0; round < 4000; ++round) {
        const std::size_t hits = cache.request(chain(random() % 80 * 100, 8));
        served += round < 1000 ? 0 : hits;
        asked += round < 1000 ? 0 : 8;
        cache.request(chain(fresh += 1000, 40));
    }
    CHECK(served > asked * 9 / 10);
}

// A loop larger than the cache leaves an LRU list without one hit.
TEST(loop_larger_than_the_cache_hits) {
    Blocks cache(1000);
    std::size_t served = 0;
    for (std::uint64_t at = 0; at < 20000; ++at) {
        const std::size_t hits = cache.request(chain(at % 125 * 100, 10));
        served += at < 10000 ? 0 : hits;
    }
    CHECK(served > 100000 / 2);
}

// An entry that was used before its eviction does not count as new when it comes again.
TEST(names_are_remembered_beyond_eviction) {
    constexpr EntryNumber kAgain = 0;
    constexpr EntryNumber kNew = 1;
    PrefixPolicy policy({1000, 1000 * kBytes});
    std::uint64_t name = 1;
    const auto admit = [&](EntryNumber entry) {
        policy.admit({.entry = entry, .name = ++name * 0x9e3779b97f4a7c15, .size_bytes = kBytes});
    };
    const std::vector<EntryNumber> used = {10, 11, 12};
    std::ranges::for_each(used, admit);
    std::vector<EntryNumber> others(500);  // twice as many names are remembered
    std::iota(others.begin(), others.end(), 100);
    std::ranges::for_each(others, admit);
    for (int round = 0; round < 3000; ++round) {
        admit(20);
        policy.touch(used);
        policy.remove(20, false);
    }
    const std::uint64_t again = name + 1;
    admit(kAgain);
    policy.touch(std::vector<EntryNumber>{kAgain});
    policy.remove(kAgain, true);
    for (int other = 0; other < 500; ++other) {
        admit(20);
        policy.remove(20, true);
    }
    name = again - 1;
    admit(kAgain);
    name += 10000;
    admit(kNew);
    for (const EntryNumber entry : others) {
        policy.remove(entry, false);
    }
    for (const EntryNumber entry : used) {
        policy.remove(entry, false);
    }
    CHECK_EQUAL(policy.choose_victim(), kNew);
}

TEST(same_calls_give_the_same_victims) {
    const auto run = [] {
        Blocks cache(700);
        std::mt19937_64 random(5);
        for (int at = 0; at < 3000; ++at) {
            cache.request(chain(random() % 200 * 100, 1 + random() % 30));
        }
        return cache.victims();
    };
    CHECK(run() == run());
}

// Records of 4 KiB and of 24 MiB in one policy: time goes by entries, all leave, each once.
TEST(entries_of_all_sizes_leave_once) {
    PrefixPolicy policy({5000, std::uint64_t{64} << 30});
    std::mt19937_64 random(9);
    std::vector<bool> known(5000, true);
    for (EntryNumber entry = 0; entry < 5000; ++entry) {
        policy.admit({.entry = entry,
                      .parent = entry % 50 == 0 ? kNoEntry : entry - 1,
                      .name = random(),
                      .size_bytes = entry % 3 == 0 ? std::uint64_t{24} << 20 : 4096});
    }
    for (EntryNumber left = 5000; left > 0; --left) {
        const EntryNumber victim = policy.choose_victim();
        CHECK(victim < 5000 && known[victim]);
        known[victim] = false;
        policy.remove(victim, true);
    }
    CHECK_EQUAL(policy.choose_victim(), kNoEntry);
}
