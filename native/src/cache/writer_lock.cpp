#include "cache/writer_lock.hpp"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace kvo {

WriterLock::~WriterLock() {
    for (Left* next = left_.load(); next != nullptr;) {
        const std::unique_ptr<Left> one(next);
        next = one->next;
    }
}

void WriterLock::leave(Call call) {
    push(std::move(call));
    // A thread that holds the lock looks for calls once more after giving it back.
    if (mutex_.try_lock()) {
        unlock();
    }
}

void WriterLock::push(Call call) {
    auto left = std::make_unique<Left>(Left{std::move(call), left_.load(std::memory_order_relaxed)});
    while (!left_.compare_exchange_weak(left->next, left.get(), std::memory_order_seq_cst)) {
    }
    static_cast<void>(left.release());
}

void WriterLock::take_left() {
    std::vector<std::unique_ptr<Left>> latest_first;
    for (Left* next = left_.exchange(nullptr, std::memory_order_acquire); next != nullptr;) {
        latest_first.emplace_back(next);
        next = latest_first.back()->next;
    }
    for (; !latest_first.empty(); latest_first.pop_back()) {
        taken_.push_back(std::move(latest_first.back()->call));
    }
}

void WriterLock::make_calls() {
    take_left();
    const std::size_t most = std::max(taken_.size(), kFew + 1) - kFew;
    for (std::size_t made = 0; made < most && !taken_.empty(); ++made) {
        const Call call = std::move(taken_.front());
        taken_.pop_front();
        call();
    }
    taken_count_.store(taken_.size(), std::memory_order_relaxed);
}

}  // namespace kvo
