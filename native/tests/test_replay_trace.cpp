#include "replay/replay_trace.hpp"

#include <vector>

#include "check.hpp"

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
