// The three ways to move a plan between a device and the host, and the table that says which.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "copy/copy_plan.hpp"

namespace kvo {

enum class CopyWay : std::uint8_t {
    batch,   // one DMA a run, many in one call to the driver
    staged,  // a kernel between pages and a buffer of the device, one DMA between it and each piece of host memory
    mapped,  // a kernel between pages and mapped host memory
};

struct WayRule {
    CopyDirection direction = CopyDirection::save;
    std::uint64_t run_bytes = 0;  // for runs of up to this length, on average
    std::uint64_t runs = 0;       // and plans of up to this many
    CopyWay way = CopyWay::batch;
};

using WayTable = std::vector<WayRule>;

// The first rule that fits; batch if none does.
inline CopyWay choose_way(std::span<const WayRule> rules, CopyDirection direction, std::uint64_t run_bytes,
                          std::uint64_t runs) {
    for (const WayRule& rule : rules) {
        if (rule.direction == direction && run_bytes <= rule.run_bytes && runs <= rule.runs) {
            return rule.way;
        }
    }
    return CopyWay::batch;
}

// Without a calibration. A DMA of less than 28 KiB costs as much as one of 28 KiB (measured by others on an H100: 5 to
// 7 GB/s from 4 to 24 KiB, 40 to 52 from 28 to 64), and a few copies are not worth a kernel.
inline WayTable default_ways() {
    constexpr std::uint64_t kFewRuns = 4;
    constexpr std::uint64_t kShortRunBytes = std::uint64_t{28} << 10;
    WayTable table;
    for (const CopyDirection direction : {CopyDirection::save, CopyDirection::load}) {
        table.push_back({direction, UINT64_MAX, kFewRuns, CopyWay::batch});
        table.push_back({direction, kShortRunBytes - 1, UINT64_MAX, CopyWay::staged});
    }
    return table;
}

}  // namespace kvo
