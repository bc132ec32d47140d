// How a CUDA engine is built. The values here are those of a large data centre part; calibration finds better ways.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/copy_engine.hpp"
#include "copy/copy_plan.hpp"
#include "copy/kernel_image.hpp"
#include "copy/record_digests.hpp"

namespace kvo {

// The three ways to move a plan between a device and the host, and the table that says which.

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

struct CudaSettings {
    int device = 0;  // its ordinal
    CopyLimits limits;
    WayTable ways = default_ways();
    // Size of every staging buffer of the device and every bounce buffer of the host; each direction has `buffers` of
    // each.
    std::uint64_t buffer_bytes = std::uint64_t{8} << 20;
    std::uint32_t buffers = 2;
    std::uint32_t kernel_entries = 16384;                 // runs that one kernel copies
    std::uint64_t list_bytes = std::uint64_t{2} << 20;    // of such runs, for all kernels under way, each direction
    std::uint32_t batch_entries = 256;                    // in one call, which launches wait for
    std::uint64_t batch_bytes = std::uint64_t{64} << 20;  // between two looks at what else there is to do
    std::uint32_t queued_transfers = 4096;  // each direction: a full queue of the driver holds up launches
    std::uint32_t parts = 64;               // with the device, each direction
    std::uint32_t kernel_blocks = 16;       // at most, and at most an eighth of the multiprocessors
    std::uint32_t kernel_threads = 512;     // a multiple of 32
    std::uint64_t piece_bytes = std::uint64_t{16} << 20;  // registered at once: launches wait meanwhile
    unsigned digest_threads = 0;                          // 0: one for four processors, at most 4
    std::chrono::microseconds poll_interval{20};          // while the device moves bytes
    // Longest sleep of a lane whose plans wait for the model or for the other lane. Other threads wake it before, as a
    // rule.
    std::chrono::milliseconds longest_sleep{200};
    std::chrono::milliseconds strange_answers{200};       // to polls and nothing else, until the device counts as lost
    std::span<const std::byte> kernels = kernel_image();  // empty: batch is the only way
    HostAccess on_host_access = {};                       // for tests
};

inline constexpr std::uint64_t kListEntryBytes = 3 * sizeof(std::uint64_t);

// How many thread blocks a kernel of ours gets on such a device: one multiprocessor of eight, and no more than `most`.
std::uint32_t choose_kernel_blocks(int multiprocessors, std::uint32_t most);

// Code::invalid names what is wrong.
Status check_settings(const CudaSettings& settings);

}  // namespace kvo
