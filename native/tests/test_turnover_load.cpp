#include "bench/turnover_load.hpp"

#include "check.hpp"

using namespace kvo;

namespace {

TurnoverShape small_shape() {
    TurnoverShape shape;
    shape.pool_bytes = 64 << 20;
    shape.segment_bytes = 16 << 20;
    shape.policy = "lru";
    shape.threads = 1;
    shape.record_bytes = {4096, 36 * 1024, 200 * 1024, 1 << 20};
    shape.byte_shares = {0.1, 0.2, 0.3, 0.4};
    return shape;
}

}  // namespace

TEST(bytes_add_up_over_turnovers_and_a_flip) {
    auto made = TurnoverLoad::create(small_shape());
    CHECK(made.ok());
    TurnoverLoad& load = *made.value();
    for (const bool is_flipped : {false, true}) {
        if (is_flipped) {
            load.flip();
        }
        const TurnoverOutcome outcome = load.run(3);
        CHECK(outcome.offered_bytes >= 3 * load.stats().capacity_bytes);
        CHECK(outcome.offered_bytes <= 3 * load.stats().capacity_bytes + (1 << 20));
        CHECK_EQUAL(outcome.refused, 0u);
        CHECK_EQUAL(outcome.admitted_bytes, outcome.offered_bytes);
        CHECK(outcome.lowest_usage > 0 && outcome.lowest_usage <= outcome.mean_usage && outcome.mean_usage <= 1);
    }
    const CacheStats stats = load.stats();
    CHECK(stats.evicted != 0 && stats.hits != 0);
    CHECK_EQUAL(stats.leases, 0u);
    CHECK_EQUAL(stats.reserved, 0u);
    CHECK_EQUAL(stats.duplicates, 0u);
}

// The policy keeps states, the largest records, for longer than what comes between them.
TEST(large_records_that_stay_do_not_break_up_the_pool) {
    TurnoverShape shape = small_shape();
    shape.pool_bytes = 256 << 20;
    shape.segment_bytes = 64 << 20;
    shape.policy = "prefix";
    shape.record_bytes = {4096, 36 << 10, 200 << 10, 6 << 20};
    auto made = TurnoverLoad::create(shape);
    CHECK(made.ok());
    made.value()->run(4);
    const TurnoverOutcome outcome = made.value()->run(4);
    CHECK_EQUAL(outcome.refused, 0u);
    CHECK(outcome.mean_usage > 0.95);
}

TEST(the_same_seed_gives_the_same_run) {
    auto one = TurnoverLoad::create(small_shape());
    auto other = TurnoverLoad::create(small_shape());
    CHECK(one.ok() && other.ok());
    const TurnoverOutcome left = one.value()->run(2);
    const TurnoverOutcome right = other.value()->run(2);
    CHECK_EQUAL(left.mean_usage, right.mean_usage);
    CHECK_EQUAL(left.moved_bytes, right.moved_bytes);
}

TEST(shapes_that_make_no_sense_are_refused) {
    TurnoverShape shape = small_shape();
    shape.byte_shares.pop_back();
    CHECK(TurnoverLoad::create(shape).fault().code() == Code::invalid);
    shape.record_bytes = {4096, 8192};
    shape.byte_shares = {0.5, 0.5};
    CHECK(TurnoverLoad::create(shape).fault().code() == Code::invalid);
}
