#include "bench/store_race.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

namespace kvo {

RaceOutcome race_stores(CacheLoad& load, std::uint64_t calls, std::uint64_t wanted,
                        const std::function<Timing()>& call) {
    RaceOutcome outcome;
    outcome.calls = calls;
    outcome.seconds.reserve(calls);
    std::atomic<bool> is_over = false;
    std::atomic<bool> has_begun = false;
    std::atomic<std::uint64_t> stored = 0;
    {
        const std::jthread writer([&] {
            do {
                stored.fetch_add(load.store(CacheLoad::kChainBlocks).done);
                has_begun.store(true);
                has_begun.notify_one();
            } while (!is_over.load());
        });
        has_begun.wait(false);
        for (std::uint64_t i = 0; i < calls; ++i) {
            if (const Timing timing = call(); timing.done == wanted) {
                outcome.seconds.push_back(timing.seconds);
            }
        }
        is_over.store(true);
    }
    outcome.stored = stored.load();
    std::ranges::sort(outcome.seconds);
    return outcome;
}

}  // namespace kvo
