#include "cache/touch_buffer.hpp"

namespace kvo {
namespace {

std::size_t own_stripe() {
    static std::atomic<std::size_t> threads = 0;
    thread_local const std::size_t stripe = threads.fetch_add(1, std::memory_order_relaxed) % TouchBuffer::kStripes;
    return stripe;
}

}  // namespace

void TouchBuffer::take_stripe() {
    drained_entries_.clear();
    drained_ends_.clear();
    next_ = 0;
    Stripe& stripe = stripes_[stripe_++ % kStripes];
    const std::lock_guard lock(stripe.mutex);
    stripe.entries.swap(drained_entries_);
    stripe.ends.swap(drained_ends_);
}

bool TouchBuffer::add(std::span<const EntryNumber> entries) {
    Stripe& stripe = stripes_[own_stripe()];
    const std::lock_guard lock(stripe.mutex);
    if (stripe.entries.size() + entries.size() > kStripeLimit && !stripe.entries.empty()) {
        lost_.fetch_add(entries.size(), std::memory_order_relaxed);
        return false;
    }
    stripe.entries.insert(stripe.entries.end(), entries.begin(), entries.end());
    stripe.ends.push_back(stripe.entries.size());
    if (stripe.entries.size() > kStripeLimit / 4) {
        is_filling_.store(true, std::memory_order_relaxed);
    }
    return true;
}

}  // namespace kvo
