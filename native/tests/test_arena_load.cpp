// How much of a full pool is useful, over many turnovers and a change of the mix.
#include <cstdio>

#include "arena_load.hpp"
#include "check.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// A hybrid model's five record sizes, and their shares of the bytes.
RecordMix hybrid_mix() {
    return RecordMix({4096, 36 * 1024, 700 * 1024, 1'363'186, 24 << 20}, {0.05, 0.10, 0.20, 0.25, 0.40});
}

struct Usage {
    double mean = 0;
    double lowest = 0;
    double moved_share = 0;  // bytes moved for each byte that came
};

// The last of `turnovers`; moves of all.
Usage measure(ArenaLoad& load, RecordMix& mix, double turnovers) {
    const ArenaLoad::Counts before = load.counts();
    UsageMeter meter;
    load.run(mix, turnovers - 1);
    load.run(mix, 1, &meter);
    const auto moved = static_cast<double>(load.counts().moved_bytes - before.moved_bytes);
    return {meter.mean(), meter.lowest(),
            moved / static_cast<double>(load.counts().allocated_bytes - before.allocated_bytes)};
}

void print(const char* what, const Usage& usage) {
    std::printf("      %-22s mean %.2f%%, lowest %.2f%%, moved %.2f%% of what came\n", what, 100 * usage.mean,
                100 * usage.lowest, 100 * usage.moved_share);
}

struct LoadedArena {
    LoadedArena(int segments, Victims victims, bool starts_flipped)
        : arena(std::move(Arena::create({}).value())), load(arena, victims, 7), mix(hybrid_mix()) {
        for (int i = 0; i < segments; ++i) {
            CHECK(arena.add_segment().ok());
        }
        if (starts_flipped) {
            mix.flip();
        }
    }

    Arena arena;
    ArenaLoad load;
    RecordMix mix;
};

void check_empties(LoadedArena& pool) {
    pool.load.pin(0);
    pool.load.evict_all();
    const ArenaStats stats = pool.arena.stats();
    CHECK_EQUAL(stats.spans, 0u);
    CHECK_EQUAL(stats.longest_free_run, 1024u);
    CHECK_EQUAL(stats.free_extents, stats.capacity_bytes >> 20);
}

}  // namespace

TEST(sixteen_gibibytes_stay_useful) {
    LoadedArena pool(16, Victims::oldest, false);
    const Usage steady = measure(pool.load, pool.mix, 20);
    print("steady", steady);
    CHECK(steady.mean >= 0.97 && steady.lowest >= 0.97);
    CHECK(steady.moved_share <= 0.05);
    pool.mix.flip();
    const Usage flipped = measure(pool.load, pool.mix, 5);
    print("flipped", flipped);
    CHECK(flipped.mean >= 0.95 && flipped.lowest >= 0.95);
    CHECK(flipped.moved_share <= 0.10);
    CHECK_EQUAL(pool.load.counts().refused_records, 0u);
    check_empties(pool);
}

TEST(a_small_pool_stays_useful_in_every_order) {
    for (const Victims victims : {Victims::oldest, Victims::least_recent, Victims::random}) {
        for (const bool starts_flipped : {false, true}) {
            LoadedArena pool(3, victims, starts_flipped);
            const Usage steady = measure(pool.load, pool.mix, 5);
            print("3 GiB steady", steady);
            CHECK(steady.mean >= 0.97 && steady.lowest >= 0.95);
            CHECK(steady.moved_share <= 0.15);
            pool.mix.flip();
            const Usage flipped = measure(pool.load, pool.mix, 3);
            print("3 GiB flipped", flipped);
            CHECK(flipped.mean >= 0.95 && flipped.lowest >= 0.95);
            CHECK(flipped.moved_share <= 0.30);
            CHECK_EQUAL(pool.load.counts().refused_records, 0u);
        }
    }
}

// One record in fifty stays in use; then they are let go.
TEST(pinned_records_cost_little_and_leave_nothing_behind) {
    LoadedArena pool(4, Victims::least_recent, false);
    pool.load.run(pool.mix, 3);
    pool.load.pin(0.02);
    const Usage pinned = measure(pool.load, pool.mix, 2);
    print("4 GiB, 2% pinned", pinned);
    CHECK(pinned.mean >= 0.90);
    pool.load.pin(0);
    const Usage unpinned = measure(pool.load, pool.mix, 2);
    print("4 GiB, pins released", unpinned);
    CHECK(unpinned.mean >= 0.97);
    check_empties(pool);
}
