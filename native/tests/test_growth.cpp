#include "bench/growth.hpp"

#include "check.hpp"

using namespace kvo;

TEST(a_cache_is_looked_at_step_by_step) {
    const auto steps = measure_growth({.entries = 50'000, .policy = "lru", .threads = 1}, 10'000);
    CHECK(steps.ok());
    CHECK_EQUAL(steps.value().size(), 5u);
    std::uint64_t entries = 0;
    for (const GrowthStep& step : steps.value()) {
        CHECK_EQUAL(step.entries, entries += 10'000);
        CHECK(step.index_bytes >= step.entries * 72);  // an entry and its digest alone
        CHECK(step.index_bytes < 16 << 20);
    }
    // The policy's list alone has 24 bytes an entry; sanitizers add more, and may have taken it from what they kept.
    CHECK(steps.value().back().private_bytes < std::uint64_t{1} << 30);
}

TEST(a_cache_that_cannot_be_made_says_why) {
    CHECK(measure_growth({.entries = 1000, .policy = "none such"}, 100).fault().code() == Code::invalid);
}
