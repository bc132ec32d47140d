#include "evict/memory_curve.hpp"

#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "check.hpp"
#include "evict/prefix_policy.hpp"
#include "replay/make_policy.hpp"
#include "replay/replay.hpp"
#include "replay/replay_memory.hpp"

using namespace kvo;

namespace {

ShadowPool make_pool(std::uint64_t capacity, std::string_view policy = "lru", EntryNumber entries = 1000) {
    return {find_policy(policy).value(), {.entry_limit = entries, .capacity_bytes = capacity}};
}

ShadowRecord block(std::uint64_t name, std::uint64_t parent = 0, std::uint64_t size_bytes = 1) {
    return {.name = name, .parent = parent, .size_bytes = size_bytes};
}

bool use(ShadowPool& pool, std::uint64_t name, std::uint64_t parent = 0) {
    pool.begin_request();
    return pool.use(block(name, parent));
}

}  // namespace

TEST(what_is_used_is_here_the_next_time) {
    ShadowPool pool = make_pool(2);
    CHECK(!use(pool, 1));
    CHECK(use(pool, 1));
    CHECK_EQUAL(pool.count(), 1U);
}

TEST(the_policy_says_what_makes_room) {
    ShadowPool pool = make_pool(2);
    use(pool, 1);
    use(pool, 2);
    use(pool, 1);
    use(pool, 3);
    CHECK(pool.holds(1) && !pool.holds(2) && pool.holds(3));
}

TEST(a_pool_has_bounds_in_bytes_and_in_records) {
    ShadowPool pool = make_pool(10, "lru", 2);
    for (std::uint64_t name = 1; name < 50; ++name) {
        use(pool, name);
        CHECK(pool.count() <= 2 && pool.used_bytes() <= 10);
    }
    pool.begin_request();
    CHECK(!pool.use(block(100, 0, 9)));
    CHECK_EQUAL(pool.used_bytes(), 10U);
    CHECK(!pool.use(block(101, 0, 11)));
    CHECK(!pool.holds(101));
}

TEST(what_a_request_uses_stays_until_the_next_one) {
    for (const std::string_view policy : {"lru", "prefix", "slru", "s3fifo", "arc"}) {
        ShadowPool pool = make_pool(3, policy);
        pool.begin_request();
        for (std::uint64_t name = 1; name <= 5; ++name) {
            CHECK(!pool.use(block(name, name - 1)));
        }
        CHECK(pool.holds(1) && pool.holds(2) && pool.holds(3) && !pool.holds(4));
        use(pool, 7);
        CHECK(pool.holds(7));
    }
}

TEST(what_was_brought_for_a_use_is_no_hit_at_that_use) {
    ShadowPool pool = make_pool(4);
    pool.begin_request();
    pool.bring(block(1), true);
    pool.bring(block(2), false);
    CHECK(!use(pool, 1));
    CHECK(use(pool, 1));
    CHECK(use(pool, 2));
    pool.bring(block(2), true);
    CHECK(use(pool, 2));
}

TEST(what_was_removed_is_unknown) {
    ShadowPool pool = make_pool(4, "prefix");
    pool.begin_request();
    pool.use(block(1));
    pool.use(block(2, 1));
    pool.use(block(2, 1));
    pool.remove(1);
    pool.remove(1);
    CHECK(!pool.holds(1) && pool.holds(2));
    pool.remove(2);
    CHECK_EQUAL(pool.count(), 0U);
    CHECK_EQUAL(pool.used_bytes(), 0U);
}

TEST(names_that_look_alike_are_told_apart) {
    ShadowPool pool = make_pool(1 << 20, "lru", 1 << 16);
    std::map<std::uint64_t, bool> known;
    std::mt19937_64 random(3);
    for (int step = 0; step < 20000; ++step) {
        const std::uint64_t name = (random() % 600) << 52 | random() % 2;
        if (random() % 3 == 0) {
            pool.remove(name);
            known[name] = false;
        } else {
            CHECK_EQUAL(use(pool, name), known[name]);
            known[name] = true;
        }
    }
    for (const auto& [name, is_known] : known) {
        CHECK_EQUAL(pool.holds(name), is_known);
    }
}

namespace {

constexpr std::uint64_t kNoBound = 1'000'000;

MemoryCurveTerms terms_of(EntryNumber capacity, std::uint64_t record_limit = kNoBound, std::uint64_t seed = 1) {
    return {.pool = {.entry_limit = capacity, .capacity_bytes = capacity},
            .make_policy = make_prefix_policy,
            .seed = seed,
            .record_limit = record_limit,
            .fades = false};
}

std::uint64_t name_of(std::uint64_t block) { return spread_bits(block) | 1; }

// Conversations behind one block, which go on now and then.
ReplayTrace make_trace(std::size_t requests, std::uint64_t seed = 5) {
    std::mt19937_64 random(seed);
    std::vector<std::vector<std::uint64_t>> talks;
    std::uint64_t next = 1;
    ReplayTrace trace;
    for (std::size_t at = 0; at < requests; ++at) {
        if (talks.empty() || random() % 4 == 0) {
            talks.push_back({0});
        }
        // The latest go on most often.
        std::vector<std::uint64_t>& talk = talks[talks.size() - 1 - random() % (random() % talks.size() + 1)];
        for (std::uint64_t more = 1 + random() % 6; more > 0; --more) {
            talk.push_back(next++);
        }
        CHECK(trace.add(talk).ok());
    }
    return trace;
}

// A pool of this capacity serves the trace, and the curve is told.
void follow(MemoryCurve& curve, const ReplayTrace& trace, EntryNumber capacity) {
    ReplayMemory memory(trace, capacity, make_prefix_policy({.entry_limit = capacity, .capacity_bytes = capacity}));
    PoolShare passed;
    for (std::size_t at = 0; at < trace.request_count(); ++at) {
        const std::span<const BlockNumber> blocks = trace.request(at);
        const std::size_t hits = memory.count_prefix(blocks);
        if (hits > 0) {
            memory.touch(blocks.first(hits));
        }
        CHECK(memory.admit(blocks, blocks.first(hits)).ok());
        std::uint64_t parent = 0;
        for (std::size_t i = 0; i < blocks.size() && memory.holds(blocks[i]); ++i) {
            const std::uint64_t name = name_of(blocks[i]);
            passed.add({.blocks = 1, .bytes = 1});
            if (curve.sample_of(name) > curve.sample_limit()) {
                continue;
            }
            curve.take({.record = {.name = name, .parent = parent, .size_bytes = 1},
                        .sample = curve.sample_of(name),
                        .kind = i < hits ? PoolNote::Kind::use : PoolNote::Kind::save,
                        .begins = parent == 0,
                        .passed = std::exchange(passed, {})});
            parent = name;
        }
    }
}

double hit_rate(const MemoryCurve::Counts& counts, std::size_t at) {
    return static_cast<double>(counts.hits[at].blocks) / static_cast<double>(counts.asked.blocks);
}

double replayed_rate(const ReplayTrace& trace, EntryNumber capacity) {
    const auto policy = make_prefix_policy({.entry_limit = capacity, .capacity_bytes = capacity});
    const auto outcome = replay(trace, plain_shape(), capacity, *policy);
    CHECK(outcome.ok());
    return static_cast<double>(outcome.value().hits) / static_cast<double>(trace.reference_count());
}

PoolNote save(const MemoryCurve& curve, std::uint64_t name, std::uint64_t parent = 0) {
    return {.record = {.name = name, .parent = parent, .size_bytes = 1},
            .sample = curve.sample_of(name),
            .kind = PoolNote::Kind::save,
            .passed = {.blocks = 1, .bytes = 1}};
}

PoolNote use(const MemoryCurve& curve, std::uint64_t name) {
    PoolNote note = save(curve, name);
    note.kind = PoolNote::Kind::use;
    note.begins = true;
    return note;
}

}  // namespace

TEST(with_all_blocks_it_says_what_replays_at_each_size_say) {
    const ReplayTrace trace = make_trace(2000);
    MemoryCurve curve(terms_of(800));
    follow(curve, trace, 800);
    const MemoryCurve::Counts counts = curve.counts();
    CHECK_EQUAL(counts.one_in, 1U);
    for (std::size_t at = 0; at < MemoryCurve::kQuarters.size(); ++at) {
        const double replayed = replayed_rate(trace, 200 * MemoryCurve::kQuarters[at]);
        CHECK(std::abs(hit_rate(counts, at) - replayed) < 0.005);
    }
    CHECK(hit_rate(counts, 4) > hit_rate(counts, 0) + 0.1);
}

TEST(with_a_sample_it_is_close_although_all_begin_with_one_block) {
    const ReplayTrace trace = make_trace(12000);
    for (const std::uint64_t seed : {1, 2, 3}) {
        MemoryCurve curve(terms_of(8000, 16000, seed));
        follow(curve, trace, 8000);
        const MemoryCurve::Counts counts = curve.counts();
        CHECK_EQUAL(counts.one_in, 4U);
        for (std::size_t at = 0; at < MemoryCurve::kQuarters.size(); ++at) {
            const double replayed = replayed_rate(trace, 2000 * MemoryCurve::kQuarters[at]);
            CHECK(std::abs(hit_rate(counts, at) - replayed) < 0.03);
        }
    }
}

TEST(the_same_seed_says_the_same) {
    const ReplayTrace trace = make_trace(3000);
    MemoryCurve one(terms_of(1000, 2000));
    MemoryCurve same(terms_of(1000, 2000));
    MemoryCurve other(terms_of(1000, 2000, 2));
    for (MemoryCurve* curve : {&one, &same, &other}) {
        follow(*curve, trace, 1000);
    }
    CHECK_EQUAL(one.counts().hits[2].blocks, same.counts().hits[2].blocks);
    CHECK_EQUAL(one.counts().asked.blocks, same.counts().asked.blocks);
    CHECK(one.counts().hits[2].blocks != other.counts().hits[2].blocks);
}

TEST(records_smaller_than_the_first_make_the_sample_smaller) {
    MemoryCurve curve({.pool = {.entry_limit = 1'000'000, .capacity_bytes = 1'000'000},
                       .make_policy = make_prefix_policy,
                       .record_limit = 1000});
    PoolNote large = save(curve, name_of(1));
    large.record.size_bytes = 100'000;
    curve.take(large);
    CHECK_EQUAL(curve.counts().one_in, 1U);
    for (std::uint64_t block = 2; block < 40'000; ++block) {
        curve.take(save(curve, name_of(block)));
    }
    // Five pools hold up to 8 blocks in 250 each, whatever comes.
    CHECK(curve.counts().one_in >= 32 && curve.counts().one_in <= 256);
}

TEST(what_was_there_before_is_not_counted) {
    MemoryCurve curve(terms_of(100));
    curve.take(use(curve, 1));
    CHECK_EQUAL(curve.counts().asked.blocks, 0U);
    curve.take(use(curve, 1));
    CHECK_EQUAL(curve.counts().asked.blocks, 1U);
    CHECK_EQUAL(curve.counts().hits[0].blocks, 1U);
    PoolNote adopted = save(curve, 2);
    adopted.kind = PoolNote::Kind::adoption;
    adopted.passed = {};
    curve.take(adopted);
    CHECK_EQUAL(curve.counts().asked.blocks, 1U);
    curve.take(use(curve, 2));
    CHECK_EQUAL(curve.counts().hits[0].blocks, 2U);
}

TEST(a_promotion_and_its_use_are_one_miss) {
    MemoryCurve curve(terms_of(100));
    PoolNote promoted = save(curve, 1);
    promoted.kind = PoolNote::Kind::promotion;
    promoted.passed = {};
    curve.take(promoted);
    curve.take(use(curve, 1));
    CHECK_EQUAL(curve.counts().asked.blocks, 1U);
    CHECK_EQUAL(curve.counts().hits[4].blocks, 0U);
}

TEST(what_was_removed_is_asked_for_in_vain_at_every_size) {
    MemoryCurve curve(terms_of(100));
    curve.take(save(curve, 1));
    PoolNote removed = save(curve, 1);
    removed.kind = PoolNote::Kind::removal;
    removed.passed = {};
    curve.take(removed);
    curve.take(save(curve, 1));
    CHECK_EQUAL(curve.counts().asked.blocks, 2U);
    CHECK_EQUAL(curve.counts().hits[4].blocks, 0U);
}

TEST(where_a_hit_needs_a_state_blocks_count_up_to_the_last_one_that_has_its_state) {
    MemoryCurve curve(terms_of(100));
    const auto block = [&](std::uint64_t name, PoolNote::Kind kind) {
        PoolNote note = save(curve, name, name - 1);
        note.record.needs_state = true;
        note.record.state = name + 100;
        note.kind = kind;
        note.begins = name == 1;
        return note;
    };
    const auto state = [&](std::uint64_t of, PoolNote::Kind kind) {
        PoolNote note = save(curve, of + 100, of);
        note.record.reuse = Reuse::exact;
        note.passed = {.bytes = 1};
        note.kind = kind;
        return note;
    };
    for (std::uint64_t name = 1; name <= 5; ++name) {
        curve.take(block(name, PoolNote::Kind::save));
    }
    curve.take(state(2, PoolNote::Kind::save));
    curve.take(state(4, PoolNote::Kind::save));
    CHECK_EQUAL(curve.counts().hits[4].blocks, 0U);
    // A request of five blocks: what was loaded, and what this pool did not have any more.
    curve.take(block(1, PoolNote::Kind::use));
    curve.take(block(2, PoolNote::Kind::use));
    curve.take(state(2, PoolNote::Kind::use));
    CHECK_EQUAL(curve.counts().hits[4].blocks, 2U);
    for (std::uint64_t name = 3; name <= 5; ++name) {
        curve.take(block(name, PoolNote::Kind::save));
    }
    CHECK_EQUAL(curve.counts().hits[4].blocks, 4U);
    CHECK_EQUAL(curve.counts().asked.blocks, 10U);
}

TEST(a_sample_says_nothing_where_a_hit_needs_a_state) {
    MemoryCurve curve(terms_of(1000, 1000));
    for (std::uint64_t block = 1; block < 100; ++block) {
        PoolNote note = save(curve, name_of(block));
        note.record.needs_state = true;
        note.record.state = name_of(block + 1000);
        curve.take(note);
    }
    CHECK(curve.counts().one_in > 1);
    CHECK_EQUAL(curve.counts().asked.blocks, 0U);
}

TEST(what_is_long_ago_counts_less) {
    MemoryCurveTerms terms = terms_of(16);
    terms.fades = true;
    MemoryCurve curve(std::move(terms));
    for (int turn = 0; turn < 100'000; ++turn) {
        curve.take(use(curve, 1));
    }
    for (std::uint64_t block = 2; block < 50'000; ++block) {
        curve.take(save(curve, name_of(block)));
    }
    CHECK(curve.counts().asked.blocks < 20'000);
    CHECK(hit_rate(curve.counts(), 2) < 0.1);
}

TEST(names_and_sizes_that_somebody_chose_keep_the_bounds) {
    std::mt19937_64 random(11);
    MemoryCurve curve(terms_of(64, 300));
    for (int step = 0; step < 50'000; ++step) {
        PoolNote note;
        note.record = {.name = random() % 40 << (random() % 60),
                       .parent = random() % 40 << (random() % 60),
                       .size_bytes = random() % 3 == 0 ? random() : random() % 9,
                       .window_blocks = static_cast<std::uint32_t>(random() % 5),
                       .group = static_cast<std::uint32_t>(random() % 64),
                       .reuse = static_cast<Reuse>(random() % 3),
                       .needs_state = random() % 2 == 0};
        note.sample = random();
        note.kind = static_cast<PoolNote::Kind>(random() % 5);
        note.begins = random() % 2 == 0;
        note.passed = {.blocks = 1, .bytes = note.record.size_bytes};
        curve.take(note);
        const MemoryCurve::Counts counts = curve.counts();
        CHECK(counts.hits[4].blocks <= counts.asked.blocks && counts.hits[4].bytes <= counts.asked.bytes);
    }
}
