// How long calls took on the server, by what was called.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "service/express_messages.hpp"

namespace kvo {

// Written and read by any threads.
class CallTimes {
public:
    static constexpr std::array<std::uint64_t, 11> kBoundsNs = {
        1'000, 3'000, 10'000, 30'000, 100'000, 300'000, 1'000'000, 3'000'000, 10'000'000, 100'000'000, 1'000'000'000};

    struct Row {
        std::string_view name;
        std::uint64_t op = 0;
        std::array<std::atomic<std::uint64_t>, kBoundsNs.size() + 1> counts = {};  // the last: longer than all bounds
        std::atomic<std::uint64_t> sum_ns = 0;
    };

    void add(std::uint64_t op, std::uint64_t took_ns) {
        const auto row = std::ranges::find(rows_, op, &Row::op);
        if (row == rows_.end()) {
            return;
        }
        const auto bucket = std::ranges::lower_bound(kBoundsNs, took_ns) - kBoundsNs.begin();
        row->counts[static_cast<std::size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
        row->sum_ns.fetch_add(took_ns, std::memory_order_relaxed);
    }

    const auto& rows() const { return rows_; }

private:
    std::array<Row, 7> rows_ = {{{"acquire", express::kAcquire},
                                 {"acquire_entries", express::kAcquireEntries},
                                 {"credits", express::kCredits},
                                 {"publish", express::kPublish},
                                 {"abort", express::kAbort},
                                 {"release", express::kRelease},
                                 {"invalidate", express::kInvalidate}}};
};

}  // namespace kvo
