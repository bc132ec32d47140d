#include "cache/removed_log.hpp"

#include <algorithm>
#include <utility>

namespace kvo {

void RemovedLog::watch(bool is_wanted) {
    const std::lock_guard lock(mutex_);
    if (!is_wanted) {
        blocks_ = {};
        taken_ = 0;
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
    if (blocks_.size() - taken_ >= limit_) {
        lost_ += 1;
    } else {
        blocks_.push_back(block);
    }
}

RemovedLog::Taken RemovedLog::take(std::size_t count) {
    const std::lock_guard lock(mutex_);
    Taken taken;
    taken.lost = std::exchange(lost_, 0);
    const std::size_t end = taken_ + std::min(count, blocks_.size() - taken_);
    taken.blocks.assign(blocks_.begin() + static_cast<std::ptrdiff_t>(taken_),
                        blocks_.begin() + static_cast<std::ptrdiff_t>(end));
    taken_ = end;
    if (taken_ == blocks_.size()) {
        blocks_ = {};
        taken_ = 0;
    } else if (taken_ >= limit_) {
        blocks_.erase(blocks_.begin(), blocks_.begin() + static_cast<std::ptrdiff_t>(taken_));
        taken_ = 0;
    }
    taken.is_all = blocks_.empty();
    return taken;
}

}  // namespace kvo
