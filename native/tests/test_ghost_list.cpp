#include "replay/ghost_list.hpp"

#include <algorithm>
#include <deque>
#include <random>

#include "check.hpp"

using namespace kvo;

TEST(a_name_is_taken_once) {
    GhostList ghosts(4);
    CHECK_EQUAL(ghosts.take(1), 0U);
    ghosts.add(1, 10);
    ghosts.add(2, 20);
    CHECK_EQUAL(ghosts.bytes(), 30U);
    CHECK_EQUAL(ghosts.take(1), 10U);
    CHECK_EQUAL(ghosts.take(1), 0U);
    CHECK_EQUAL(ghosts.count(), 1U);
    CHECK_EQUAL(ghosts.bytes(), 20U);
}

TEST(one_too_many_ends_the_oldest) {
    GhostList ghosts(3);
    for (std::uint64_t name = 1; name <= 5; ++name) {
        ghosts.add(name, 1);
    }
    CHECK_EQUAL(ghosts.count(), 3U);
    CHECK_EQUAL(ghosts.take(2), 0U);
    CHECK_EQUAL(ghosts.take(3), 1U);
}

TEST(none_are_kept_where_none_may_be) {
    GhostList ghosts(0);
    ghosts.add(1, 1);
    ghosts.drop_oldest();
    CHECK_EQUAL(ghosts.count(), 0U);
    CHECK_EQUAL(ghosts.take(1), 0U);
}

TEST(huge_sizes_count_as_the_largest) {
    GhostList ghosts(2);
    ghosts.add(1, std::uint64_t{1} << 40);
    CHECK_EQUAL(ghosts.take(1), 0xffffffffU);
}

// The model's places are the ring's: one that was taken counts until it is the oldest.
TEST(agrees_with_a_plain_queue) {
    struct Ghost {
        std::uint64_t name;
        std::uint64_t size_bytes;
    };
    for (const EntryNumber limit : {1U, 7U, 64U, 1000U}) {
        std::mt19937_64 random(limit);
        GhostList ghosts(limit);
        std::deque<Ghost> model;
        const auto is_alive = [](const Ghost& ghost) { return ghost.size_bytes > 0; };
        for (int step = 0; step < 20'000; ++step) {
            const std::uint64_t name = random() % (2 * limit) * 0x9e3779b97f4a7c15;
            const auto found =
                std::ranges::find_if(model, [&](const Ghost& ghost) { return ghost.name == name && is_alive(ghost); });
            if (random() % 40 == 0) {
                ghosts.drop_oldest();
                while (!model.empty() && !is_alive(model.front())) {
                    model.pop_front();
                }
                if (!model.empty()) {
                    model.pop_front();
                }
            } else if (found != model.end()) {
                CHECK_EQUAL(ghosts.take(name), found->size_bytes);
                found->size_bytes = 0;
            } else {
                CHECK_EQUAL(ghosts.take(name), 0U);
                const std::uint64_t size = 1 + random() % 100;
                ghosts.add(name, size);
                if (model.size() == limit) {
                    model.pop_front();
                }
                model.push_back({name, size});
            }
            std::uint64_t bytes = 0;
            for (const Ghost& ghost : model) {
                bytes += ghost.size_bytes;
            }
            CHECK_EQUAL(ghosts.bytes(), bytes);
            CHECK_EQUAL(ghosts.count(), static_cast<EntryNumber>(std::ranges::count_if(model, is_alive)));
        }
    }
}
