#include "copy/list_ring.hpp"

#include <deque>
#include <random>
#include <vector>

#include "check.hpp"

using namespace kvo;

// Lists come and go in order; no two that are there at once share a byte, and none goes over the end.
TEST(lists_never_lie_on_each_other) {
    struct List {
        std::uint64_t begin, end;
    };
    std::mt19937_64 random(5);
    for (int round = 0; round < 50; ++round) {
        ListRing ring{.size_bytes = 100 + random() % 300};
        std::vector<int> owner(ring.size_bytes, 0);
        std::deque<List> lists;
        std::uint64_t found = 0;
        for (int step = 0; step < 500; ++step) {
            const std::uint64_t bytes = 1 + random() % (ring.size_bytes / 2);
            if (const auto begin = ring.find_room(bytes)) {
                CHECK(ring.offset_of(*begin) + bytes <= ring.size_bytes);
                for (std::uint64_t at = *begin; at < *begin + bytes; ++at) {
                    CHECK_EQUAL(owner[ring.offset_of(at)]++, 0);
                }
                ring.head = *begin + bytes;
                lists.push_back({*begin, ring.head});
                ++found;
            } else {
                CHECK(!lists.empty());
            }
            if (!lists.empty() && random() % 2 == 0) {
                for (std::uint64_t at = lists.front().begin; at < lists.front().end; ++at) {
                    --owner[ring.offset_of(at)];
                }
                ring.tail = lists.front().end;
                lists.pop_front();
            }
        }
        CHECK(found > 100);
    }
}

TEST(a_ring_that_is_full_says_so) {
    ListRing ring{.size_bytes = 100};
    CHECK_EQUAL(ring.find_room(60).value(), 0u);
    ring.head = 60;
    CHECK(!ring.find_room(50));
    CHECK_EQUAL(ring.find_room(40).value(), 60u);
    ring.tail = 60;
    CHECK_EQUAL(ring.find_room(50).value(), 100u);
}
