// Seeded delays. They are measured in turns, which calls to the driver and operations make, so that an operation can be
// late by many calls on any machine. A delay ends by itself when no thread makes turns, or when others have the
// processor.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvo::fake {

// Until others have taken `count` turns, but for `yields` at most, and about as long as those take on a free processor.
inline void wait_turns(const std::atomic<std::uint64_t>& turns, std::uint64_t count, int yields) {
    using Clock = std::chrono::steady_clock;
    const std::uint64_t until = turns.load(std::memory_order_relaxed) + count;
    const Clock::time_point end = Clock::now() + std::chrono::microseconds(yields);
    for (; turns.load(std::memory_order_relaxed) < until && yields > 0 && Clock::now() < end; --yields) {
        sched_yield();
    }
}

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
class Chance {
public:
    explicit Chance(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {
        std::uint64_t mixed = state_ += 0x9e3779b97f4a7c15u;
        mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
        mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
        return mixed ^ mixed >> 31;
    }
    std::uint64_t below(std::uint64_t limit) { return limit == 0 ? 0 : next() % limit; }

    template <typename Item>
    void shuffle(std::vector<Item>& items) {
        for (std::size_t left = items.size(); left > 1; --left) {
            std::swap(items[left - 1], items[below(left)]);
        }
    }

private:
    std::uint64_t state_;
};

class Pace {
public:
    Pace(std::atomic<std::uint64_t>& turns, std::uint64_t seed, int longest)
        : turns_(turns), chance_(seed), longest_(static_cast<std::uint64_t>(longest)) {}

    Chance& chance() { return chance_; }

    // Mostly none, sometimes short, seldom long. Not to be called under a lock.
    void delay() {
        turns_.fetch_add(1, std::memory_order_relaxed);
        const std::uint64_t sort = chance_.below(8);
        const std::uint64_t longest = sort < 4 ? 0 : sort < 7 ? longest_ / 8 : longest_;
        wait_turns(turns_, chance_.below(longest + 1), kYields);
    }

private:
    static constexpr int kYields = 100;
    std::atomic<std::uint64_t>& turns_;
    Chance chance_;
    std::uint64_t longest_;
};

}  // namespace kvo::fake
