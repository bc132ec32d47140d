// How many calls the server refused, by why.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvo {

// Written and read by any threads.
class RefusalCounts {
public:
    static constexpr std::size_t kCodes = 32;  // of the protocol, with room for more

    void add(std::uint64_t code) {
        if (code < kCodes) {
            counts_[code].fetch_add(1, std::memory_order_relaxed);
        }
    }

    std::uint64_t of(std::uint64_t code) const { return counts_[code].load(std::memory_order_relaxed); }

private:
    std::array<std::atomic<std::uint64_t>, kCodes> counts_ = {};
};

}  // namespace kvo
