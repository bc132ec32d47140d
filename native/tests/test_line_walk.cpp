#include "bench/line_walk.hpp"

#include "check.hpp"

using namespace kvo;

TEST(each_hash_counts_one_line_up) {
    for (const std::uint64_t entries : {1, 7, 5000}) {
        auto walk = LineWalk::create(entries);
        CHECK(walk.ok());
        CHECK_EQUAL(walk.value().walk(3, 100, LineWalk::Second::count_up).done, 300u);
        CHECK_EQUAL(walk.value().count(), 300u);
        CHECK_EQUAL(walk.value().walk(2, 50, LineWalk::Second::read).done, 100u);
        CHECK_EQUAL(walk.value().count(), 300u);
    }
}

// A limit that stayed on few lines would stay in the processor's cache.
TEST(most_lines_are_come_by) {
    auto walk = LineWalk::create(1000);
    CHECK(walk.ok());
    walk.value().walk(100, 1000, LineWalk::Second::count_up);
    CHECK(walk.value().counted_lines() > 850);
}
