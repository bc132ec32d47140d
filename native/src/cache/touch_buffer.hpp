// What was acquired and has not been told to the eviction policies yet: an acquire must not wait for the writer.
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

    // False if the stripe is full and these touches are lost: it costs order, not bytes.
    bool add(std::span<const EntryNumber> entries);

    // Whether somebody should drain before long.
    bool is_filling() const noexcept { return is_filling_.load(std::memory_order_relaxed); }

    // Calls `touch(entries)` for each acquire, in the order of its thread. Under the writer's lock.
    template <typename Touch>
    void drain(Touch touch) {
        is_filling_.store(false, std::memory_order_relaxed);
        for (Stripe& stripe : stripes_) {
            {
                const std::lock_guard lock(stripe.mutex);
                stripe.entries.swap(drained_entries_);
                stripe.ends.swap(drained_ends_);
            }
            std::size_t begin = 0;
            for (const std::size_t end : drained_ends_) {
                touch(std::span<const EntryNumber>(drained_entries_).subspan(begin, end - begin));
                begin = end;
            }
            drained_entries_.clear();
            drained_ends_.clear();
        }
    }

private:
    struct alignas(64) Stripe {
        std::mutex mutex;
        std::vector<EntryNumber> entries;
        std::vector<std::size_t> ends;
    };

    std::array<Stripe, kStripes> stripes_;
    std::atomic<bool> is_filling_ = false;
    std::vector<EntryNumber> drained_entries_;
    std::vector<std::size_t> drained_ends_;
};

}  // namespace kvo
