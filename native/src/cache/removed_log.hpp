// Blocks that cannot be found any more, kept until they are taken to be reported to others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "index/layout.hpp"

namespace kvo {

struct RemovedBlock {
    Space space = 0;
    HashWords hash{};
};

// Safe to call from any thread; a thread that adds holds the writer's lock.
class RemovedLog {
public:
    static constexpr std::size_t kLimit = std::size_t{1} << 20;

    // Beyond so many blocks, or without memory for them, those that were removed are only counted.
    explicit RemovedLog(std::size_t limit = kLimit) : limit_(limit) {}

    // Sets whether removed blocks are wanted. Blocks that are removed before they are wanted are not told.
    void watch(bool is_wanted);
    bool is_wanted() const { return is_wanted_.load(std::memory_order_acquire); }

    void add(RemovedBlock block);

    struct Taken {
        std::vector<RemovedBlock> blocks;
        std::uint64_t lost = 0;
        bool is_all = true;  // nothing is left
    };
    // The oldest, so many at most.
    Taken take(std::size_t count);

private:
    const std::size_t limit_;
    std::atomic<bool> is_wanted_ = false;
    std::mutex mutex_;  // guards what follows
    // Grows and shrinks a few at a time: a thread that adds holds up all other writers.
    std::deque<RemovedBlock> blocks_;
    std::uint64_t lost_ = 0;
};

}  // namespace kvo
