// Acquired entries that the eviction policies have not been told of yet: an acquire must not wait for the writer.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <span>
#include <vector>

#include "base/entry_number.hpp"

namespace kvo {

// Safe to call from any thread. Threads write to stripes of their own, so they seldom meet.
class TouchBuffer {
public:
    static constexpr std::size_t kStripes = 8;
    static constexpr std::size_t kStripeLimit = 1u << 16;  // entries; what comes beyond is not remembered
    static constexpr std::size_t kAtOnce = 1u << 14;       // entries drained under one hold of a lock

    // False if the stripe is full and these touches are lost: it costs order, not bytes.
    bool add(std::span<const EntryNumber> entries);

    // Entries whose touches were lost.
    std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }

    // Whether the buffer should be drained before long.
    bool is_filling() const noexcept { return is_filling_.load(std::memory_order_relaxed); }

    // Calls `touch(entries)` for each acquire, in the order of its thread, until at least `limit` entries were touched;
    // what is left comes the next time. Under the writer's lock.
    template <typename Touch>
    void drain(Touch touch, std::size_t limit = SIZE_MAX) {
        is_filling_.store(false, std::memory_order_relaxed);
        std::size_t touched = 0;
        for (std::size_t taken = 0; touched < limit;) {
            if (next_ == drained_ends_.size()) {
                if (taken++ == kStripes) {
                    return;
                }
                take_stripe();
                continue;
            }
            const std::size_t begin = next_ == 0 ? 0 : drained_ends_[next_ - 1];
            const std::size_t count = drained_ends_[next_++] - begin;
            touch(std::span<const EntryNumber>(drained_entries_).subspan(begin, count));
            touched += count;
        }
        is_filling_.store(true, std::memory_order_relaxed);
    }

private:
    struct alignas(64) Stripe {
        std::mutex mutex;
        std::vector<EntryNumber> entries;
        std::vector<std::size_t> ends;
    };

    std::array<Stripe, kStripes> stripes_;
    std::atomic<bool> is_filling_ = false;
    std::atomic<std::uint64_t> lost_ = 0;
    void take_stripe();

    std::vector<EntryNumber> drained_entries_;  // of the stripe before `stripe_`
    std::vector<std::size_t> drained_ends_;
    std::size_t next_ = 0;    // of `drained_ends_`
    std::size_t stripe_ = 0;  // whose turn it is
};

}  // namespace kvo
