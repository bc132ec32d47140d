#include "replay/belady.hpp"

#include <bit>
#include <map>
#include <random>
#include <vector>

#include "check.hpp"
#include "replay/make_policy.hpp"
#include "replay/replay.hpp"

using namespace kvo;

namespace {

// Ways from the root of a random tree, its low numbers the busier.
ReplayTrace random_trace(std::mt19937& random, std::size_t blocks, std::size_t requests) {
    std::vector<std::uint64_t> parents{0};
    while (parents.size() < blocks) {
        parents.push_back(random() % parents.size());
    }
    ReplayTrace trace;
    for (std::size_t at = 0; at < requests; ++at) {
        std::vector<std::uint64_t> path{std::min(random() % blocks, random() % blocks)};
        while (path.back() != 0) {
            path.push_back(parents[path.back()]);
        }
        CHECK(trace.add(std::vector<std::uint64_t>(path.rbegin(), path.rend())).ok());
    }
    return trace;
}

// The most hits of all choices of what to keep after each request.
std::uint64_t try_everything(const ReplayTrace& trace, std::uint64_t capacity) {
    std::map<std::uint32_t, std::uint64_t> best{{0, 0}};  // hits by the set of resident blocks
    for (std::size_t at = 0; at < trace.request_count(); ++at) {
        std::map<std::uint32_t, std::uint64_t> next;
        for (const auto& [resident, hits] : best) {
            std::uint32_t wanted = 0;
            std::uint64_t served = 0;
            for (const BlockNumber block : trace.request(at)) {
                served +=
                    served == static_cast<std::uint64_t>(std::popcount(wanted)) && (resident >> block & 1) ? 1 : 0;
                wanted |= std::uint32_t{1} << block;
            }
            const std::uint32_t at_hand = resident | wanted;
            for (std::uint32_t kept = at_hand;; kept = (kept - 1) & at_hand) {
                if (static_cast<std::uint64_t>(std::popcount(kept)) <= capacity) {
                    next[kept] = std::max(next[kept], hits + served);
                }
                if (kept == 0) {
                    break;
                }
            }
        }
        best = std::move(next);
    }
    std::uint64_t most = 0;
    for (const auto& [resident, hits] : best) {
        most = std::max(most, hits);
    }
    return most;
}

}  // namespace

TEST(nothing_is_better) {
    std::mt19937 random(1);
    for (int round = 0; round < 60; ++round) {
        const ReplayTrace trace = random_trace(random, 7, 8);
        for (const std::uint64_t capacity : {0U, 1U, 2U, 3U, 5U}) {
            CHECK_EQUAL(count_optimal_hits(trace, capacity).hits, try_everything(trace, capacity));
        }
    }
}

TEST(no_policy_is_better) {
    std::mt19937 random(2);
    for (int round = 0; round < 10; ++round) {
        const ReplayTrace trace = random_trace(random, 300, 1000);
        for (const std::uint64_t capacity : {5U, 20U, 80U, 300U}) {
            const std::uint64_t optimum = count_optimal_hits(trace, capacity).hits;
            for (const std::string_view name : policy_names()) {
                auto policy = make_policy(name, replay_bounds(plain_shape(), capacity));
                const auto outcome = replay(trace, plain_shape(), capacity, *policy.value());
                CHECK_EQUAL(outcome.ok() ? "" : std::string(name) + ": " + outcome.fault().message(), "");
                CHECK(outcome.value().hits <= optimum);
                CHECK(outcome.value().peak_bytes <= capacity);
            }
        }
    }
}

TEST(with_room_for_all_every_block_misses_once) {
    std::mt19937 random(3);
    const ReplayTrace trace = random_trace(random, 100, 500);
    CHECK_EQUAL(count_optimal_hits(trace, 100).hits, trace.reference_count() - trace.block_count());
}

TEST(a_worked_example) {
    ReplayTrace trace;
    for (const std::vector<std::uint64_t>& ids :
         {std::vector<std::uint64_t>{1, 2, 3}, {1, 4}, {1, 2, 3}, {1, 4}, {5}}) {
        CHECK(trace.add(ids).ok());
    }
    // Room for two: 1 and 4 (its next request is sooner than 2's at the second), then 1 and 2 cannot both stay.
    CHECK_EQUAL(count_optimal_hits(trace, 1).hits, 3U);
    CHECK_EQUAL(count_optimal_hits(trace, 2).hits, 4U);
    CHECK_EQUAL(count_optimal_hits(trace, 3).hits, 5U);
    CHECK_EQUAL(count_optimal_hits(trace, 4).hits, 6U);
    CHECK_EQUAL(count_optimal_hits(trace, 4).hit_squares, 1U + 9U + 4U);
}
