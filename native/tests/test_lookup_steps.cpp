// Look-ups and changes of an index, one instruction at a time.
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <algorithm>
#include <functional>
#include <string>

#include "child_process.hpp"
#include "index_traffic.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// One instruction of a stopped child. True: it has stopped itself.
bool step(const ChildProcess& child) {
    CHECK(ptrace(PTRACE_SINGLESTEP, child.pid(), nullptr, nullptr) == 0);
    int status = 0;
    CHECK(waitpid(child.pid(), &status, WUNTRACED) == child.pid());
    CHECK(WIFSTOPPED(status));
    return WSTOPSIG(status) == SIGSTOP;
}

// Runs `act` in a process of its own, which has the index where we have it, and stops it after every instruction to
// call `between`. Returns how many there were; ends the process at instruction `end`.
std::uint64_t step_through(const IndexFixture& index, const std::function<void()>& act,
                           const std::function<void()>& between, std::uint64_t end = ~std::uint64_t{0}) {
    ChildProcess child([&](const Line&) {
        index.map_again();
        if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
            return 98;
        }
        raise(SIGSTOP);
        act();
        raise(SIGSTOP);
        return 0;
    });
    child.wait_stopped();
    for (std::uint64_t steps = 0; steps < end; ++steps) {
        if (step(child)) {
            return steps;
        }
        between();
    }
    return end;
}

void check_verdict(const IndexView& view, const KeyKinds& keys) {
    CHECK_EQUAL(static_cast<int>(read_all(view, keys, false)), static_cast<int>(kGood));
}

// Looks a key up in a process of its own, and calls `change` when the look-up has made `at` instructions. Returns how
// many it had made by then; fewer, if it was over. The header's clock says how far it is.
std::uint64_t interrupt(const IndexFixture& index, std::uint64_t at, const std::function<void()>& change,
                        const Key& key, Found& found) {
    constexpr std::uint32_t kBegun = 1;
    constexpr std::uint32_t kOver = 2;
    std::atomic<std::uint32_t>& clock = index.view().header->clock;
    std::atomic<std::uint32_t>& entry = index.view().header->session_count;
    std::atomic<std::uint64_t>& word = index.view().header->version_counter;
    ChildProcess child([&](const Line&) {
        index.map_again();
        if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
            return 98;
        }
        raise(SIGSTOP);
        clock = kBegun;
        const Found own = find_entry(index.view(), key);
        clock = kOver;
        entry = own.entry;
        word = own.word.bits();
        return 0;
    });
    child.wait_stopped();
    while (clock.load() != kBegun) {
        CHECK(!step(child));
    }
    std::uint64_t steps = 0;
    for (; steps < at && clock.load() != kOver; ++steps) {
        CHECK(!step(child));
    }
    if (clock.load() != kOver) {
        change();
    }
    CHECK(ptrace(PTRACE_CONT, child.pid(), nullptr, nullptr) == 0);
    CHECK_EQUAL(child.wait_exit(), 0);
    found = {entry.load(), EntryWord(word.load())};
    return steps;
}

// Points of a look-up at which it is interrupted, spread over all of it.
std::vector<std::uint64_t> choose_points(const IndexFixture& index, const Key& key) {
    constexpr std::uint64_t kPoints = 40;
    Found found;
    const std::uint64_t length = interrupt(index, ~std::uint64_t{0}, [] {}, key, found);
    CHECK(length > 100);
    std::vector<std::uint64_t> points;
    for (std::uint64_t i = 0; i < kPoints; ++i) {
        points.push_back(i * length / kPoints);
    }
    return points;
}

// A chain of three buckets, a full bucket of another chain, and a table in which one more key makes the first chain
// split.
struct Scene {
    // The last of the `length` keys belongs into the new bucket then, or not.
    Scene(std::size_t length, bool is_last_leaving) : index(1000) {
        keys = make_colliding_keys(length - 1, 0, 6);
        keys.push_back(make_colliding_keys(1, is_last_leaving ? 64 : 0, 7, 1).front());
        neighbours = make_colliding_keys(Bucket::kCapacity + 1, 1, 6);
        for (const Key& key : keys) {
            entries.push_back(index.add(key));
        }
        for (std::size_t i = 0; i < Bucket::kCapacity; ++i) {
            index.add(neighbours[i]);
        }
        for (std::uint64_t number = 0; (index.table().size() + 1) * 10 <= 64 * Bucket::kCapacity * 6; ++number) {
            if (const Key key = make_key(number); (mix_key(key, kSeed) & 63) > 1) {
                index.add(key);
            }
        }
    }

    IndexFixture index;
    std::vector<Key> keys;
    std::vector<EntryNumber> entries;
    std::vector<Key> neighbours;  // of the next chain; the last one is not there yet
    Key last = make_key(1'000'000);
};

}  // namespace

// A writer may die, or lose its processor, after any of its instructions; a reader still finds every entry.
TEST(after_every_instruction_of_a_change_a_reader_finds_what_is_there) {
    const KeyKinds keys = make_crowded(12, 40, 10);
    IndexFixture index(1000);
    std::vector<EntryNumber> lasting;
    std::vector<EntryNumber> passing;
    for (std::size_t i = 0; i < 24; ++i) {
        passing.push_back(index.add(keys.passing[i]));
        if (i % 2 == 0) {
            lasting.push_back(index.add(keys.lasting[i / 2]));
        }
    }
    const auto look = [&] { check_verdict(index.view(), keys); };
    look();
    const auto act = [&] {
        index.move(lasting[3], keys.lasting[3]);
        index.remove(passing[0]);  // filled from the last bucket
        for (std::size_t i = 0; i < 4; ++i) {
            index.remove(passing[5 + i]);  // which empties it, sooner or later
        }
        for (std::size_t i = 0; i < 6; ++i) {
            index.add(keys.passing[30 + i]);
        }
    };
    CHECK(step_through(index, act, look) > 500);
    look();
}

TEST(after_every_instruction_of_a_split_a_reader_finds_what_is_there) {
    // A chain of 30 that the first split deals to two, and as many elsewhere that it takes to bring that split about.
    const KeyKinds keys = make_crowded(20, 10, 6);
    IndexFixture index(2000);
    for (const Key& key : keys.lasting) {
        index.add(key);
    }
    for (const Key& key : keys.passing) {
        index.add(key);
    }
    const auto is_due = [&](std::uint64_t size) { return size * 10 > 64ull * Bucket::kCapacity * 6; };
    for (std::uint64_t number = 0; !is_due(index.table().size() + 1); ++number) {
        if (const Key key = make_key(number); (mix_key(key, kSeed) & 63) != 0) {
            index.add(key);
        }
    }
    CHECK_EQUAL(index.bucket_count(), 64u);
    const auto look = [&] { check_verdict(index.view(), keys); };
    const Key last = make_key(1'000'000);
    CHECK(step_through(index, [&] { index.add(last); }, look) > 500);
    CHECK_EQUAL(index.bucket_count(), 65u);
    look();
}

TEST(what_a_writer_left_that_died_in_a_change_is_filled_anew) {
    const KeyKinds keys = make_crowded(30, 60, 6);
    for (std::uint64_t end = 40; end < 4'000; end += 433) {
        IndexFixture index(1000);
        for (const Key& key : keys.lasting) {
            index.add(key);
        }
        std::vector<EntryNumber> passing;
        for (const Key& key : keys.passing) {
            passing.push_back(index.add(key));
        }
        const auto act = [&] {
            for (const EntryNumber number : passing) {
                index.remove(number);
            }
        };
        step_through(index, act, [] {}, end);
        Table table(index.view(), [](const Region&, std::uint64_t) { return Status(); });
        CHECK(table.reset().ok());
        std::uint64_t readable = 0;
        for (EntryNumber number = 0; number < index.view().header->entry_count.load(); ++number) {
            if (index.word(number).is_readable()) {
                CHECK(table.insert(number).ok());
                ++readable;
            }
        }
        CHECK_EQUAL(table.size(), readable);
        check_verdict(index.view(), keys);
    }
}

// The other way round: the index changes once, at one point of a look-up or another, and it finds its key. The key is
// the last one of its chain, so that it is the one to go elsewhere.
TEST(in_the_middle_of_a_look_up_its_chain_may_change) {
    constexpr std::size_t kFull = 2 * Bucket::kCapacity;
    struct Case {
        std::size_t length;
        bool is_leaving;  // by a split
        void (*change)(Scene&);
    };
    const Case cases[] = {
        {kFull + 1, false, [](Scene& scene) { scene.index.move(scene.entries.back(), scene.keys.back()); }},
        {kFull + 2, false, [](Scene& scene) { scene.index.remove(scene.entries.front()); }},
        // Its bucket is given up, and then belongs to another chain.
        {kFull + 1, false,
         [](Scene& scene) {
             scene.index.remove(scene.entries.front());
             scene.index.add(scene.neighbours.back());
         }},
        {kFull + 1, false, [](Scene& scene) { scene.index.add(scene.last); }},
        {kFull + 1, true, [](Scene& scene) { scene.index.add(scene.last); }},
    };
    for (const Case& one : cases) {
        const Scene first(one.length, one.is_leaving);
        for (const std::uint64_t at : choose_points(first.index, first.keys.back())) {
            Scene scene(one.length, one.is_leaving);
            Found found;
            interrupt(scene.index, at, [&] { one.change(scene); }, scene.keys.back(), found);
            if (found.entry != scene.entries.back()) {
                fail(__FILE__, __LINE__, "missed after instruction " + std::to_string(at));
            }
        }
    }
}

// The number of an entry that goes is given to the very key that is looked for: it is found as it is now, or not yet.
TEST(in_the_middle_of_a_look_up_an_entry_may_become_another) {
    const std::vector<Key> keys = make_colliding_keys(2'000, 0, 6);
    const auto tag = [](const Key& key) { return tag_of(mix_key(key, kSeed)); };
    const auto twin =
        std::find_if(keys.begin() + 1, keys.end(), [&](const Key& key) { return tag(key) == tag(keys[0]); });
    CHECK(twin != keys.end());
    IndexFixture first(1000);
    first.add(*twin);
    for (const std::uint64_t at : choose_points(first, keys[0])) {
        IndexFixture index(1000);
        const EntryNumber entry = index.add(*twin);
        const auto change = [&] {
            index.remove(entry);
            CHECK_EQUAL(index.add(keys[0]), entry);
        };
        Found found;
        interrupt(index, at, change, keys[0], found);
        CHECK(found.entry == kNoEntry || found.word == index.word(found.entry));
        CHECK(at != 0 || found.entry == entry);
    }
}
