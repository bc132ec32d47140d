#include "cache/removed_log.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace kvo {

void RemovedLog::watch(bool is_wanted) {
    std::deque<RemovedBlock> unwanted;  // ends without the lock
    const std::lock_guard lock(mutex_);
    if (!is_wanted) {
        blocks_.swap(unwanted);
        lost_ = 0;
    }
    is_wanted_.store(is_wanted, std::memory_order_release);
}

void RemovedLog::add(RemovedBlock block) {
    if (!is_wanted()) {
        return;
    }
    const std::lock_guard lock(mutex_);
    if (!is_wanted()) {
        return;
    }
    if (blocks_.size() >= limit_) {
        lost_ += 1;
        return;
    }
    try {
        blocks_.push_back(block);
    } catch (const std::bad_alloc&) {
        lost_ += 1;
    }
}

RemovedLog::Taken RemovedLog::take(std::size_t count) {
    const std::lock_guard lock(mutex_);
    Taken taken;
    const auto end = blocks_.begin() + static_cast<std::ptrdiff_t>(std::min(count, blocks_.size()));
    taken.blocks.assign(blocks_.begin(), end);
    blocks_.erase(blocks_.begin(), end);
    taken.lost = std::exchange(lost_, 0);
    taken.is_all = blocks_.empty();
    return taken;
}

}  // namespace kvo
