#include "replay/useful_bytes.hpp"

#include <set>
#include <utility>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

using Held = std::set<std::pair<std::uint32_t, BlockNumber>>;  // group and block

ReplayTrace make_trace(const std::vector<std::vector<std::uint64_t>>& requests) {
    ReplayTrace trace;
    for (const auto& ids : requests) {
        CHECK(trace.add(ids).ok());
    }
    return trace;
}

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
