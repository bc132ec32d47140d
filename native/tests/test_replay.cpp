#include "replay/replay.hpp"

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.hpp"
#include "replay/lru.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;

namespace {

void add(ReplayTrace& trace, const std::vector<std::uint64_t>& ids) { CHECK(trace.add(ids).ok()); }

std::vector<BlockNumber> request(const ReplayTrace& trace, std::size_t at) {
    return {trace.request(at).begin(), trace.request(at).end()};
}

}  // namespace

TEST(blocks_are_numbered_as_they_appear) {
    ReplayTrace trace;
    add(trace, {500, 7, 9});
    add(trace, {500, 7, 11});
    add(trace, {});
    add(trace, {3});
    CHECK_EQUAL(trace.request_count(), 3U);
    CHECK_EQUAL(trace.reference_count(), 7U);
    CHECK_EQUAL(trace.block_count(), 5U);
    CHECK_EQUAL(request(trace, 0), (std::vector<BlockNumber>{0, 1, 2}));
    CHECK_EQUAL(request(trace, 1), (std::vector<BlockNumber>{0, 1, 3}));
    CHECK_EQUAL(request(trace, 2), (std::vector<BlockNumber>{4}));
    CHECK_EQUAL(trace.parent(3), 1U);
    CHECK_EQUAL(trace.parent(4), kNoBlock);
    CHECK_EQUAL(trace.depth(3), 3U);
    CHECK_EQUAL(trace.depth(4), 1U);
}

TEST(an_id_behind_another_one_is_another_block) {
    ReplayTrace trace;
    add(trace, {1, 2, 3});
    add(trace, {4, 2, 3});
    add(trace, {1, 1, 1});
    CHECK_EQUAL(trace.block_count(), 8U);
    CHECK_EQUAL(request(trace, 1), (std::vector<BlockNumber>{3, 4, 5}));
    CHECK_EQUAL(request(trace, 2), (std::vector<BlockNumber>{0, 6, 7}));
}

namespace {

using Ids = std::vector<std::uint64_t>;

ReplayTrace make_trace(const std::vector<Ids>& requests) {
    ReplayTrace trace;
    for (const Ids& ids : requests) {
        CHECK(trace.add(ids).ok());
    }
    return trace;
}

ReplayOutcome run(const ReplayTrace& trace, const ReplayShape& shape, std::uint64_t capacity) {
    LruPolicy policy;
    const auto outcome = replay(trace, shape, capacity, policy);
    CHECK(outcome.ok());
    return outcome.value();
}

// `count` blocks, those from `fork` on numbered apart by `branch`.
Ids prompt(std::size_t count, std::size_t fork = 1000, std::uint64_t branch = 0) {
    Ids ids;
    for (std::uint64_t at = 0; at < count; ++at) {
        ids.push_back(at < fork ? at : at + 1000 * branch);
    }
    return ids;
}

// Passes everything on to an LRU and writes down what it was told.
class Recorder final : public EvictionPolicy {
public:
    void admit(const Admission& made) override {
        admissions.push_back(made);
        lru_.admit(made);
    }
    void touch(std::span<const EntryNumber> entries) override {
        touches.emplace_back(entries.begin(), entries.end());
        lru_.touch(entries);
    }
    void spare(EntryNumber entry) override { spared.push_back(entry); }
    EntryNumber choose_victim() override { return lru_.choose_victim(); }
    void keep(EntryNumber entry) override { lru_.keep(entry); }
    void remove(EntryNumber entry, bool was_evicted) override { lru_.remove(entry, was_evicted); }

    std::vector<Admission> admissions;
    std::vector<std::vector<EntryNumber>> touches;
    std::vector<EntryNumber> spared;

private:
    LruPolicy lru_;
};

// Always names the same entry.
class Stubborn final : public EvictionPolicy {
public:
    explicit Stubborn(EntryNumber victim) : victim_(victim) {}
    void admit(const Admission&) override {}
    void touch(std::span<const EntryNumber>) override {}
    EntryNumber choose_victim() override { return victim_; }
    void keep(EntryNumber) override {}
    void remove(EntryNumber, bool) override {}

private:
    EntryNumber victim_;
};

}  // namespace

TEST(plain_hits_are_the_longest_present_prefix) {
    const ReplayTrace trace = make_trace({{1, 2, 3}, {1, 2, 4}, {5}, {1, 2, 3, 6}, {1, 2, 3, 6}});
    // Six blocks hold all: 0 + 2 + 0 + 3 + 4.
    CHECK_EQUAL(run(trace, plain_shape(), 6).hits, 9U);
    CHECK_EQUAL(run(trace, plain_shape(), 6).hit_squares, 4U + 9U + 16U);
    // With four blocks, 5 is the fourth miss: it fits next to 1, 2 and 3 once 4 went, or 3. LRU: 3 was behind 1 2 4, so
    // 3 goes.
    const ReplayOutcome four = run(trace, plain_shape(), 4);
    CHECK_EQUAL(four.hits, 0U + 2U + 0U + 2U + 4U);
    CHECK_EQUAL(four.peak_bytes, 4U);
    CHECK_EQUAL(four.evicted + 4U, four.admitted);
    CHECK_EQUAL(run(trace, plain_shape(), 0).hits, 0U);
}

TEST(what_does_not_fit_beside_the_leased_is_refused) {
    const ReplayTrace trace = make_trace({{1, 2, 3, 4, 5}, {1, 2, 3, 6}});
    const ReplayOutcome outcome = run(trace, plain_shape(), 3);
    CHECK_EQUAL(outcome.hits, 3U);
    CHECK_EQUAL(outcome.admitted, 3U);
    CHECK_EQUAL(outcome.evicted, 0U);
    CHECK_EQUAL(outcome.refused, 3U);
}

TEST(hybrid_boundaries_need_every_group) {
    const ReplayShape shape = hybrid_shape();
    const struct {
        const char* what;
        std::vector<Ids> requests;
        std::uint64_t hits;
    } cases[] = {
        {"seven blocks are no boundary", {prompt(7), prompt(7)}, 0},
        {"eight are", {prompt(8), prompt(8)}, 8},
        {"fifteen are eight", {prompt(15), prompt(15)}, 8},
        {"a run passes every state on its way", {prompt(24), prompt(24)}, 24},
        {"a fork ends at the last boundary below", {prompt(24), prompt(24, 17, 1)}, 16},
        {"a longer prompt adds to what is there", {prompt(8), prompt(16), prompt(16)}, 8 + 16},
        {"blocks of an unfinished boundary are reused once it is there", {prompt(12), prompt(20), prompt(20)}, 8 + 16},
    };
    for (const auto& one : cases) {
        const ReplayTrace trace = make_trace(one.requests);
        const std::uint64_t hits = run(trace, shape, total_bytes(trace, shape)).hits;
        if (hits != one.hits) {
            kvo::test::fail(__FILE__, __LINE__, std::string(one.what) + ": " + std::to_string(hits));
        }
    }
}

TEST(hybrid_admits_what_a_run_computes) {
    const ReplayTrace trace = make_trace({prompt(17), prompt(25)});
    Recorder policy;
    const ReplayShape shape = hybrid_shape();
    CHECK(replay(trace, shape, 10'000, policy).ok());
    // 17 prefix and window blocks, states at 8 and 16; then eight more of both, and the state at 24.
    CHECK_EQUAL(policy.admissions.size(), 17U + 17U + 2U + 8U + 8U + 1U);
    // The hit at 16: prefix blocks 0 to 15, windows 12 to 15, the state at 16, in this order.
    std::vector<EntryNumber> leased;
    for (EntryNumber at = 0; at < 16; ++at) {
        leased.push_back(at);
    }
    for (EntryNumber at = 12; at < 16; ++at) {
        leased.push_back(17 + at);
    }
    leased.push_back(35);
    CHECK_EQUAL(policy.touches.size(), 1U);
    CHECK_EQUAL(policy.touches[0], leased);

    // Block 16 and its window were there behind the hit.
    CHECK_EQUAL(policy.spared, std::vector<EntryNumber>({16, 33}));

    for (std::size_t at = 0; at < 17; ++at) {
        const Admission& prefix = policy.admissions[at];
        const Admission& window = policy.admissions[17 + at];
        CHECK_EQUAL(prefix.parent, at == 0 ? kNoEntry : static_cast<EntryNumber>(at - 1));
        CHECK_EQUAL(window.parent, static_cast<EntryNumber>(at));
        CHECK(prefix.reuse == Reuse::prefix && prefix.needs_state && prefix.size_bytes == 4);
        CHECK(window.reuse == Reuse::window && !window.needs_state && window.size_bytes == 2);
        CHECK_EQUAL(window.window_blocks, 4U);
        CHECK(prefix.name != window.name);
    }
    const Admission& state = policy.admissions[34];
    CHECK(state.reuse == Reuse::exact && state.size_bytes == 16);
    CHECK_EQUAL(state.parent, EntryNumber{7});
}

TEST(a_record_that_comes_again_has_its_name_again) {
    const ReplayTrace trace = make_trace({{1, 2}, {3, 4}, {1, 2}});
    Recorder policy;
    CHECK(replay(trace, plain_shape(), 2, policy).ok());
    CHECK_EQUAL(policy.admissions.size(), 6U);
    CHECK_EQUAL(policy.admissions[0].name, policy.admissions[4].name);
    CHECK(policy.admissions[0].name != policy.admissions[1].name);
    for (const Admission& made : policy.admissions) {
        CHECK(made.entry < replay_bounds(plain_shape(), 2).entry_limit);
    }
}

TEST(totals_count_distinct_records) {
    const ReplayTrace trace = make_trace({prompt(17), prompt(9, 8, 1)});
    CHECK_EQUAL(total_bytes(trace, plain_shape()), 18U);
    CHECK_EQUAL(total_bytes(trace, hybrid_shape()), 18U * 6U + 2U * 16U);
    CHECK_EQUAL(replay_bounds(hybrid_shape(), 101).entry_limit, 50U);
}

TEST(useless_bytes_are_sampled_once_memory_was_full) {
    std::vector<Ids> requests;
    for (std::uint64_t at = 0; at < 400; ++at) {
        requests.push_back(prompt(8, 0, at + 1));
    }
    const ReplayTrace trace = make_trace(requests);
    CHECK_EQUAL(run(trace, plain_shape(), 100).samples, 2U);
    CHECK_EQUAL(run(trace, plain_shape(), 10'000).samples, 0U);
    CHECK_EQUAL(run(trace, plain_shape(), 100).useless_share, 0.0);
    // One prompt at a time: of 64 units the four windows that no boundary needs.
    CHECK_EQUAL(run(trace, hybrid_shape(), 64).useless_share, 8.0 / 64.0);
}

TEST(no_policy_passes_the_capacity) {
    std::mt19937 random(5);
    std::vector<Ids> requests;
    for (int at = 0; at < 600; ++at) {
        requests.push_back(prompt(1 + random() % 60, random() % 40, random() % 20));
    }
    const ReplayTrace trace = make_trace(requests);
    for (const ReplayShape& shape : {plain_shape(), hybrid_shape()}) {
        for (const std::uint64_t capacity : {std::uint64_t{1}, std::uint64_t{70}, total_bytes(trace, shape) / 10}) {
            for (const std::string_view name : policy_names()) {
                auto policy = make_policy(name, replay_bounds(shape, capacity));
                const auto outcome = replay(trace, shape, capacity, *policy.value());
                CHECK(outcome.ok());
                CHECK(outcome.value().peak_bytes <= capacity);
                CHECK(outcome.value().hits < trace.reference_count());
            }
        }
    }
}

TEST(a_policy_that_breaks_its_contract_is_named) {
    const ReplayTrace trace = make_trace({{1, 2}, {1, 2, 3}, {4, 5, 6}});
    for (const EntryNumber victim : {kNoEntry, EntryNumber{7}, EntryNumber{0}}) {
        Stubborn policy(victim);
        const auto outcome = replay(trace, plain_shape(), 3, policy);
        CHECK(!outcome.ok());
        CHECK(outcome.fault().code() == Code::failed);
    }
    Stubborn leased(0);
    CHECK(replay(make_trace({{1}, {2}, {1, 3, 4}}), plain_shape(), 3, leased).fault().code() == Code::failed);
}

TEST(a_shape_that_is_none_is_refused) {
    const ReplayTrace trace = make_trace({{1}});
    LruPolicy policy;
    const ReplayGroup prefix;
    const ReplayShape shapes[] = {
        {},
        {ReplayGroup{.reuse = Reuse::window, .window_blocks = 1}},
        {ReplayGroup{.size_bytes = 0}},
        {prefix, ReplayGroup{.reuse = Reuse::window}},
        {prefix, ReplayGroup{.reuse = Reuse::exact, .every_blocks = 2},
         ReplayGroup{.reuse = Reuse::exact, .every_blocks = 3}},
    };
    for (const ReplayShape& shape : shapes) {
        const auto outcome = replay(trace, shape, 10, policy);
        CHECK(!outcome.ok());
        CHECK(outcome.fault().code() == Code::invalid);
    }
}

namespace {

using Held = std::set<std::pair<std::uint32_t, BlockNumber>>;  // group and block

std::uint64_t count(const ReplayTrace& trace, const ReplayShape& shape, std::uint32_t step, const Held& held) {
    return useful_bytes(trace, shape, step,
                        [&](std::uint32_t group, BlockNumber block) { return held.contains({group, block}); });
}

// Boundaries every two blocks, a window of one, a state at each boundary; sizes tell the groups apart.
const ReplayShape kHybrid{ReplayGroup{.reuse = Reuse::prefix, .size_bytes = 1},
                          ReplayGroup{.reuse = Reuse::window, .size_bytes = 10, .window_blocks = 1},
                          ReplayGroup{.reuse = Reuse::exact, .size_bytes = 100, .every_blocks = 2}};

}  // namespace

TEST(a_plain_block_needs_all_blocks_before_it) {
    const ReplayTrace trace = make_trace({{1, 2, 3}, {1, 4}});
    CHECK_EQUAL(count(trace, plain_shape(), 1, {}), 0U);
    CHECK_EQUAL(count(trace, plain_shape(), 1, {{0, 0}, {0, 2}, {0, 3}}), 2U);  // block 2 stands alone
    CHECK_EQUAL(count(trace, plain_shape(), 1, {{0, 1}, {0, 2}, {0, 3}}), 0U);
}

TEST(hybrid_records_are_useful_for_a_boundary_only) {
    const ReplayTrace trace = make_trace({{1, 2, 3, 4}, {1, 2, 5}});
    const Held all{{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {1, 0}, {1, 1}, {1, 2}, {1, 3}, {2, 1}, {2, 3}};
    // Without the third block of the second request and the windows at odd blocks.
    CHECK_EQUAL(count(trace, kHybrid, 2, all), 4U + 20U + 200U);
    Held held = all;
    held.erase({2, 3});  // the state at 4: blocks 3 and 4 lead nowhere
    CHECK_EQUAL(count(trace, kHybrid, 2, held), 2U + 10U + 100U);
    held = all;
    held.erase({1, 1});  // the window at 2: its state too, but its blocks lead to 4
    CHECK_EQUAL(count(trace, kHybrid, 2, held), 4U + 10U + 100U);
    held = all;
    held.erase({0, 0});
    CHECK_EQUAL(count(trace, kHybrid, 2, held), 0U);
}

TEST(a_window_at_the_start_is_as_short_as_the_prompt) {
    ReplayShape shape = kHybrid;
    shape[1].window_blocks = 3;
    const ReplayTrace trace = make_trace({{1, 2, 3, 4}});
    const Held held{{0, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 0}, {1, 1}, {1, 3}, {2, 1}, {2, 3}};
    CHECK_EQUAL(count(trace, shape, 2, held), 2U + 20U + 100U);
}
