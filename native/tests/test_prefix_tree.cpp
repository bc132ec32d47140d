#include "check.hpp"
#include "evict/prefix_policy.hpp"
#include "policy_driver.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

using namespace kvo;
using kvo::test::evict_some;

namespace {

constexpr std::uint32_t kWindow = 2;

// Sequences of a hybrid model: block, window block and, where asked for, a state, in numbers that tell which is which.
class Hybrid {
public:
    Hybrid() : policy({10000, 10000}) {}

    static EntryNumber block(EntryNumber at) { return 3 * at; }
    static EntryNumber window(EntryNumber at) { return 3 * at + 1; }
    static EntryNumber state(EntryNumber at) { return 3 * at + 2; }

    // Blocks [begin, end) behind `parent`, a state at the end of every `distance`th.
    void admit(EntryNumber begin, EntryNumber end, EntryNumber parent, std::uint32_t distance) {
        for (EntryNumber at = begin; at < end; ++at) {
            add(block(at), at == begin ? parent : block(at - 1), Reuse::prefix);
        }
        for (EntryNumber at = begin; at < end; ++at) {
            add(window(at), block(at), Reuse::window);
        }
        for (EntryNumber at = begin; at < end; ++at) {
            if (distance > 0 && (at + 1 - begin) % distance == 0) {
                add(state(at), block(at), Reuse::exact);
            }
        }
    }

    void add(EntryNumber entry, EntryNumber parent, Reuse reuse) {
        policy.admit({.entry = entry,
                      .parent = parent,
                      .name = entry * 0x9e3779b97f4a7c15,
                      .size_bytes = 1,
                      .reuse = reuse,
                      .needs_state = reuse == Reuse::prefix,
                      .window_blocks = reuse == Reuse::window ? kWindow : 0,
                      .group = static_cast<std::uint32_t>(reuse)});
    }

    // Others come and stay, so that what is here is no longer young.
    void let_time_pass() {
        for (int at = 0; at < 400; ++at) {
            add(next_, kNoEntry, Reuse::prefix);
            policy.remove(next_, false);
        }
    }

    std::vector<EntryNumber> evict(std::size_t count) { return evict_some(policy, count); }

    PrefixPolicy policy;

private:
    EntryNumber next_ = 9000;
};

std::vector<EntryNumber> sorted(std::vector<EntryNumber> entries) {
    std::ranges::sort(entries);
    return entries;
}

}  // namespace

TEST(what_no_boundary_needs_goes_first) {
    Hybrid at;
    at.admit(0, 6, kNoEntry, 4);
    at.let_time_pass();
    // The state behind block 3 needs blocks 0 to 3 and the windows of 2 and 3.
    const std::vector<EntryNumber> useless = {Hybrid::window(0), Hybrid::window(1), Hybrid::block(4),
                                              Hybrid::window(4), Hybrid::block(5),  Hybrid::window(5)};
    CHECK(sorted(at.evict(6)) == sorted(useless));
    CHECK_EQUAL(at.policy.choose_victim(), Hybrid::state(3));
}

TEST(all_that_a_state_unlocked_follows_it) {
    Hybrid at;
    at.admit(0, 4, kNoEntry, 4);
    at.admit(100, 104, kNoEntry, 4);
    at.let_time_pass();
    at.evict(4);
    const EntryNumber first = at.policy.choose_victim();
    CHECK(first == Hybrid::state(3) || first == Hybrid::state(103));
    const EntryNumber base = first == Hybrid::state(3) ? 0 : 100;
    const std::vector<EntryNumber> unit = {Hybrid::state(base + 3), Hybrid::window(base + 2), Hybrid::window(base + 3),
                                           Hybrid::block(base + 3), Hybrid::block(base + 2),  Hybrid::block(base + 1),
                                           Hybrid::block(base + 0)};
    CHECK(sorted(at.evict(7)) == sorted(unit));
    CHECK_EQUAL(at.policy.choose_victim(), Hybrid::state(103 - base));
}

// Last states are used once, those before them never. Of two sequences that have not been used yet, the older has a
// last state only. The states that the other sequence has passed go first, with their windows, and the blocks stay.
TEST(passed_state_goes_before_an_older_last_one) {
    Hybrid at;
    const std::vector<EntryNumber> hit = {Hybrid::block(0),  Hybrid::block(1),  Hybrid::block(2), Hybrid::block(3),
                                          Hybrid::block(4),  Hybrid::block(5),  Hybrid::block(6), Hybrid::block(7),
                                          Hybrid::window(6), Hybrid::window(7), Hybrid::state(7)};
    for (int round = 0; round < 200; ++round) {
        at.admit(0, 8, kNoEntry, 4);
        at.let_time_pass();
        at.policy.touch(hit);
        at.let_time_pass();
        for (EntryNumber block = 8; block-- > 0;) {
            for (const EntryNumber entry : {Hybrid::state(block), Hybrid::window(block), Hybrid::block(block)}) {
                if (entry % 3 != 2 || block % 4 == 3) {
                    at.policy.remove(entry, false);
                }
            }
        }
    }
    at.admit(100, 104, kNoEntry, 4);
    at.let_time_pass();
    at.admit(200, 208, kNoEntry, 4);
    at.let_time_pass();
    at.evict(6);  // the windows nobody needs
    const std::vector<EntryNumber> passed = {Hybrid::window(202), Hybrid::state(203), Hybrid::window(203)};
    CHECK_EQUAL(at.policy.choose_victim(), Hybrid::state(203));
    CHECK(sorted(at.evict(3)) == sorted(passed));
    CHECK_EQUAL(at.policy.choose_victim(), Hybrid::state(103));
}

TEST(young_useless_entries_wait_for_the_rest_of_their_commit) {
    Hybrid at;
    at.admit(200, 204, kNoEntry, 4);
    at.let_time_pass();
    at.evict(2);
    at.admit(0, 2, kNoEntry, 0);
    CHECK_EQUAL(at.policy.choose_victim(), Hybrid::state(203));
    at.add(Hybrid::state(1), Hybrid::block(1), Reuse::exact);
    at.let_time_pass();
    const EntryNumber victim = at.policy.choose_victim();
    CHECK(victim == Hybrid::state(203) || victim == Hybrid::state(1));
}

TEST(blocks_behind_a_boundary_in_use_are_not_taken_away_from_under_the_request) {
    Hybrid at;
    at.admit(0, 6, kNoEntry, 4);
    at.admit(100, 106, kNoEntry, 4);
    at.let_time_pass();
    at.policy.touch(std::vector<EntryNumber>{Hybrid::block(0), Hybrid::block(1), Hybrid::block(2), Hybrid::block(3),
                                             Hybrid::window(2), Hybrid::window(3), Hybrid::state(3)});
    const std::vector<EntryNumber> gone = at.evict(10);
    CHECK(std::ranges::find(gone, Hybrid::block(105)) != gone.end());
    CHECK(std::ranges::find(gone, Hybrid::block(5)) == gone.end());
    CHECK(std::ranges::find(gone, Hybrid::block(4)) == gone.end());
}

// The same if the policy cannot tell which of several continuations the request has: a save behind one of them shows
// it.
TEST(what_is_spared_is_not_taken_away_from_under_the_request) {
    Hybrid at;
    at.admit(0, 6, kNoEntry, 4);
    at.admit(100, 102, Hybrid::block(3), 0);
    at.let_time_pass();
    at.policy.touch(std::vector<EntryNumber>{Hybrid::block(0), Hybrid::block(1), Hybrid::block(2), Hybrid::block(3),
                                             Hybrid::window(2), Hybrid::window(3), Hybrid::state(3)});
    for (const EntryNumber entry : {Hybrid::block(4), Hybrid::block(5), Hybrid::window(5)}) {
        at.policy.spare(entry);
    }
    at.policy.spare(Hybrid::state(3));  // of use as it is: nothing changes
    const std::vector<EntryNumber> others = {Hybrid::window(0),  Hybrid::window(1),   Hybrid::window(4),  //
                                             Hybrid::block(100), Hybrid::window(100), Hybrid::block(101),
                                             Hybrid::window(101)};
    CHECK(sorted(at.evict(7)) == sorted(others));
    at.let_time_pass();
    CHECK(sorted(at.evict(3)) == sorted({Hybrid::block(4), Hybrid::block(5), Hybrid::window(5)}));
}

TEST(entry_without_its_block_goes_first_until_it_is_used) {
    Hybrid at;
    at.admit(0, 4, kNoEntry, 4);
    at.add(Hybrid::state(50), kNoEntry, Reuse::exact);
    at.add(Hybrid::state(60), Hybrid::block(60), Reuse::exact);  // a parent that is not here
    at.let_time_pass();
    at.evict(2);  // windows 0 and 1
    CHECK(sorted({at.policy.choose_victim(), Hybrid::state(50)}).front() == Hybrid::state(50));
    at.policy.touch(std::vector<EntryNumber>{Hybrid::state(50), Hybrid::state(60)});
    at.let_time_pass();
    CHECK_EQUAL(at.policy.choose_victim(), Hybrid::state(3));
}

// Blocks 1 and 2 came before block 0, or it was taken away and came again: an acquire shows how they hang together.
TEST(acquire_joins_blocks_that_came_without_their_parent) {
    for (const bool is_renewed : {false, true}) {
        PrefixPolicy policy({100, 100});
        const auto add = [&](EntryNumber entry, EntryNumber parent) {
            policy.admit({.entry = entry, .parent = parent, .name = entry, .size_bytes = 1});
        };
        if (is_renewed) {
            add(0, kNoEntry);
        }
        add(1, is_renewed ? 0 : kNoEntry);
        add(2, 1);
        if (is_renewed) {
            policy.remove(0, false);
        }
        add(0, kNoEntry);
        policy.touch(std::vector<EntryNumber>{0, 1, 2});
        for (const EntryNumber entry : {2U, 1U, 0U}) {
            CHECK_EQUAL(policy.choose_victim(), entry);
            policy.remove(entry, true);
        }
    }
}

// Groups follow each other in an acquire: the first block of the second does not hang on the last of the first.
TEST(acquire_does_not_join_blocks_of_two_groups) {
    PrefixPolicy policy({100, 100});
    policy.admit({.entry = 0, .name = 0, .size_bytes = 1, .group = 1});
    policy.admit({.entry = 1, .name = 1, .size_bytes = 1, .group = 2});
    policy.touch(std::vector<EntryNumber>{0, 1});
    policy.remove(policy.choose_victim(), true);
    const EntryNumber second = policy.choose_victim();
    CHECK(second != kNoEntry);
    PrefixPolicy again({100, 100});
    again.admit({.entry = 0, .name = 0, .size_bytes = 1, .group = 1});
    again.admit({.entry = 1, .name = 1, .size_bytes = 1, .group = 2});
    again.touch(std::vector<EntryNumber>{0, 1});
    again.keep(1);
    CHECK_EQUAL(again.choose_victim(), 0U);
}

namespace {

constexpr std::uint32_t kSecondGroup = 2;

// Sequences of a model with windows and without states.
class Windowed {
public:
    Windowed() : policy({10000, 10000}) {}

    static EntryNumber block(EntryNumber at) { return 3 * at; }
    static EntryNumber window(EntryNumber at, std::uint32_t group = 1) { return 3 * at + group; }

    void admit_blocks(EntryNumber begin, EntryNumber end) {
        for (EntryNumber at = begin; at < end; ++at) {
            add(block(at), at == begin ? kNoEntry : block(at - 1), Reuse::prefix, 0);
        }
    }

    void admit_windows(EntryNumber begin, EntryNumber end, std::uint32_t group = 1) {
        for (EntryNumber at = begin; at < end; ++at) {
            add(window(at, group), block(at), Reuse::window, group);
        }
    }

    void let_time_pass() {
        for (int at = 0; at < 400; ++at) {
            add(next_, kNoEntry, Reuse::prefix, 0);
            policy.remove(next_, false);
        }
    }

    // Blocks are used again soon, and no window ever is.
    void teach_that_blocks_are_used() {
        for (int round = 0; round < 200; ++round) {
            admit_blocks(0, 8);
            admit_windows(6, 8);
            let_time_pass();
            policy.touch(std::vector<EntryNumber>{block(0), block(1), block(2), block(3), block(4), block(5)});
            let_time_pass();
            for (EntryNumber at = 8; at-- > 0;) {
                if (at >= 6) {
                    policy.remove(window(at), false);
                }
                policy.remove(block(at), false);
            }
        }
    }

    std::vector<EntryNumber> evict(std::size_t count) { return evict_some(policy, count); }

    PrefixPolicy policy;

private:
    void add(EntryNumber entry, EntryNumber parent, Reuse reuse, std::uint32_t group) {
        policy.admit({.entry = entry,
                      .parent = parent,
                      .name = entry * 0x9e3779b97f4a7c15,
                      .size_bytes = 1,
                      .reuse = reuse,
                      .window_blocks = reuse == Reuse::window ? kWindow : 0,
                      .group = group});
    }

    EntryNumber next_ = 9000;
};

}  // namespace

TEST(all_that_a_window_unlocked_follows_it) {
    Windowed at;
    at.teach_that_blocks_are_used();
    for (const EntryNumber begin : {0U, 100U}) {
        at.admit_blocks(begin, begin + 6);
        at.admit_windows(begin + 4, begin + 6);
    }
    at.let_time_pass();
    const EntryNumber first = at.policy.choose_victim();
    CHECK(first == Windowed::window(5) || first == Windowed::window(105));
    const EntryNumber base = first == Windowed::window(5) ? 0 : 100;
    const std::vector<EntryNumber> unit = {
        Windowed::block(base + 0), Windowed::block(base + 1),  Windowed::block(base + 2), Windowed::block(base + 3),
        Windowed::block(base + 4), Windowed::window(base + 4), Windowed::block(base + 5), Windowed::window(base + 5)};
    CHECK(sorted(at.evict(8)) == unit);
    CHECK_EQUAL(at.policy.choose_victim(), Windowed::window(105 - base));
}

TEST(blocks_up_to_the_boundary_before_go_with_the_last_one) {
    Windowed at;
    at.admit_blocks(0, 10);
    at.admit_windows(2, 4);
    at.admit_windows(8, 10);
    at.let_time_pass();
    at.policy.remove(Windowed::window(9), false);
    const std::vector<EntryNumber> useless = {Windowed::block(4), Windowed::block(5), Windowed::block(6),
                                              Windowed::block(7), Windowed::block(8), Windowed::window(8),
                                              Windowed::block(9)};
    CHECK(sorted(at.evict(7)) == useless);
    CHECK_EQUAL(at.policy.choose_victim(), Windowed::window(3));
}

TEST(one_groups_window_takes_the_others_with_it) {
    Windowed at;
    at.admit_blocks(0, 4);
    at.admit_windows(2, 4);
    at.admit_windows(2, 4, kSecondGroup);
    at.admit_blocks(100, 104);
    at.admit_windows(102, 104);
    at.let_time_pass();
    at.policy.remove(Windowed::window(3), false);
    const std::vector<EntryNumber> useless = {Windowed::block(0),
                                              Windowed::block(1),
                                              Windowed::block(2),
                                              Windowed::window(2),
                                              Windowed::window(2, kSecondGroup),
                                              Windowed::block(3),
                                              Windowed::window(3, kSecondGroup)};
    CHECK(sorted(at.evict(7)) == useless);
    CHECK_EQUAL(at.policy.choose_victim(), Windowed::window(103));
}

// Notes that a tier has such a window, or has it no longer, change nothing.
TEST(a_window_of_no_use_goes_first_whatever_a_tier_has) {
    for (const bool has : {true, false}) {
        Windowed at;
        at.admit_blocks(100, 104);
        at.admit_windows(102, 104);
        at.admit_blocks(0, 4);
        at.admit_windows(2, 4);
        at.admit_windows(2, 4, kSecondGroup);
        at.let_time_pass();
        at.policy.remove(Windowed::window(3), false);
        const std::vector<EntryNumber> useless = {Windowed::window(2), Windowed::window(2, kSecondGroup),
                                                  Windowed::window(3, kSecondGroup)};
        at.policy.note_tier(Windowed::window(103), has);
        for (const EntryNumber window : useless) {
            at.policy.note_tier(window, true);
            at.policy.note_tier(window, has);
        }
        const std::vector<EntryNumber> gone = at.evict(7);
        for (const EntryNumber window : useless) {
            CHECK(std::ranges::find(gone, window) != gone.end());
        }
        CHECK_EQUAL(at.policy.choose_victim(), Windowed::window(103));
    }
}

// Windows of all blocks: each is a boundary's end for as long as it and those before it are here.
TEST(where_a_whole_window_is_left_only_the_block_behind_it_goes) {
    for (const bool is_broken : {false, true}) {
        Windowed at;
        at.admit_blocks(0, 10);
        at.admit_windows(0, 10);
        at.let_time_pass();
        if (is_broken) {
            at.policy.remove(Windowed::window(7), false);
        }
        at.policy.remove(Windowed::window(9), false);
        if (is_broken) {
            const std::vector<EntryNumber> useless = {Windowed::block(7), Windowed::block(8), Windowed::window(8),
                                                      Windowed::block(9)};
            CHECK(sorted(at.evict(4)) == useless);
        } else {
            CHECK_EQUAL(at.evict(1).front(), Windowed::block(9));
        }
        const EntryNumber next = at.policy.choose_victim();
        CHECK(next != kNoEntry && next % 3 == 1);
        CHECK(next != Windowed::window(7));  // not before the boundary that needs it
    }
}

TEST(a_broken_window_is_whole_again_when_what_was_missing_comes) {
    Windowed at;
    at.admit_blocks(0, 6);
    at.admit_windows(4, 6);
    at.admit_blocks(100, 106);
    at.admit_windows(104, 106);
    at.let_time_pass();
    at.policy.remove(Windowed::window(5), false);
    at.admit_windows(5, 6);
    at.let_time_pass();
    CHECK_EQUAL(at.policy.choose_victim(), Windowed::window(105));
}

namespace {

// A model of the tree, made from the calls alone.
class TreeModel {
public:
    // The share of admitted entries that need a state, in quarters.
    TreeModel(std::uint64_t seed, std::uint64_t stateful_quarters)
        : random_(seed), stateful_quarters_(stateful_quarters), policy_({kEntries, kEntries}) {}

    void step() {
        const std::uint64_t choice = random_() % 16;
        if (choice < 7) {
            admit();
        } else if (choice < 9) {
            touch();
        } else if (choice < 14) {
            evict();
        } else if (choice == 14 && !known_.empty()) {
            take_away(pick());
            note_tiers();
        } else if (const EntryNumber victim = policy_.choose_victim(); victim != kNoEntry) {
            policy_.keep(victim);
        }
        check_victim();
    }

    void drain() {
        while (!known_.empty()) {
            check_victim();
            evict();
        }
        CHECK_EQUAL(policy_.choose_victim(), kNoEntry);
    }

private:
    static constexpr EntryNumber kEntries = 60;

    struct Known {
        EntryNumber parent = kNoEntry;
        std::uint64_t parent_birth = 0;
        std::uint64_t birth = 0;
        Reuse reuse = Reuse::prefix;
    };

    EntryNumber pick() { return std::next(known_.begin(), static_cast<long>(random_() % known_.size()))->first; }

    bool hangs_on(const Known& child, EntryNumber parent) const {
        const auto found = known_.find(parent);
        return child.parent == parent && found != known_.end() && found->second.birth == child.parent_birth;
    }

    void admit() {
        const auto entry = static_cast<EntryNumber>(random_() % kEntries);
        if (known_.contains(entry)) {
            return;
        }
        const auto reuse = static_cast<Reuse>(std::array{0, 0, 0, 1, 1, 2}[random_() % 6]);
        EntryNumber parent = known_.empty() || random_() % 8 == 0 ? kNoEntry : pick();
        if (parent != kNoEntry && known_[parent].reuse != Reuse::prefix) {
            parent = kNoEntry;
        }
        known_[entry] = {parent, parent == kNoEntry ? 0 : known_[parent].birth, ++births_, reuse};
        // The policy sees the same low bits for the third window group as for the first.
        const std::array<std::uint32_t, 3> group_steps = {0, reuse == Reuse::window ? 4u : 0u,
                                                          reuse == Reuse::window ? 8u : 0u};
        policy_.admit({.entry = entry,
                       .parent = parent,
                       .name = random_() % 200 * 0x9e3779b97f4a7c15,
                       .size_bytes = 1 + random_() % 3,
                       .reuse = reuse,
                       .needs_state = random_() % 4 < stateful_quarters_,
                       .window_blocks = static_cast<std::uint32_t>(1 + random_() % 5),
                       .group = static_cast<std::uint32_t>(reuse) + group_steps[random_() % 3]});
    }

    // A path from a root, as far as it is known, and what hangs on its end.
    void touch() {
        if (known_.empty()) {
            return;
        }
        std::vector<EntryNumber> path;
        for (EntryNumber at = pick();;) {
            path.push_back(at);
            const Known& known = known_[at];
            if (known.parent == kNoEntry || !hangs_on(known, known.parent)) {
                break;
            }
            at = known.parent;
        }
        std::ranges::reverse(path);
        policy_.touch(path);
    }

    void evict() {
        const EntryNumber victim = policy_.choose_victim();
        if (victim != kNoEntry) {
            policy_.remove(victim, true);
            known_.erase(victim);
        }
    }

    void note_tiers() {
        for (int note = 0; note < 3 && !known_.empty(); ++note) {
            policy_.note_tier(pick(), random_() % 2 == 0);
        }
    }

    void take_away(EntryNumber entry) {
        policy_.remove(entry, false);
        known_.erase(entry);
    }

    void check_victim() {
        const EntryNumber victim = policy_.choose_victim();
        CHECK_EQUAL(victim == kNoEntry, known_.empty());
        CHECK_EQUAL(policy_.choose_victim(), victim);
        CHECK(victim == kNoEntry || known_.contains(victim));
        for (const auto& [entry, known] : known_) {
            CHECK(!hangs_on(known, victim));
        }
    }

    std::mt19937_64 random_;
    std::uint64_t stateful_quarters_;
    PrefixPolicy policy_;
    std::map<EntryNumber, Known> known_;
    std::uint64_t births_ = 0;
};

}  // namespace

// Entries are removed in any order: there is a victim while any entry is known, and no known entry hangs on it.
TEST(parent_never_goes_before_its_children) {
    for (std::uint64_t seed = 1; seed <= 120; ++seed) {
        TreeModel model(seed, seed % 4);
        for (int step = 0; step < 3000; ++step) {
            model.step();
        }
        model.drain();
    }
}
