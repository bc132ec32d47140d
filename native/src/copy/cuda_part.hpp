// The part of a plan that is handed to the device at once. Decided here, done by cuda_issue.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/cuda_ranges.hpp"
#include "copy/cuda_way.hpp"
#include "copy/run_list.hpp"

namespace kvo {

struct PartLimits {
    std::uint64_t bytes = 0;
    std::size_t entries = 0;
};

// The buffers that a part may use besides pages and slots, as large as the limits say. Addresses of the driver.
struct PartBuffers {
    CudaAddress staging = 0;
    CudaAddress bounce = 0;         // pinned host memory
    CudaAddress bounce_mapped = 0;  // the same, as the device calls it
};

// One copy, between a page or the staging buffer and what is not.
struct PartEntry {
    CudaAddress device = 0;
    CudaAddress other = 0;
    std::uint64_t length = 0;
};

struct CopyPart {
    std::uint64_t begin = 0;  // in the plan's row of bytes
    std::uint64_t end = 0;
    bool is_bounced = false;           // the host copies between slots and the bounce buffer
    std::vector<PartEntry> kernel;     // pages to staging (staged) or to mapped host memory (mapped)
    std::vector<PartEntry> transfers;  // pages or staging to host memory
};

// Whether the slot's byte at `position` of the row is registered; there is such a byte.
bool starts_registered(const RunList& runs, std::uint64_t position, const HostPieces& pieces);

// The part that begins at `begin`: all of it registered or all of it bounced, and no copy across two pieces.
CopyPart cut_part(const RunList& runs, std::uint64_t begin, CopyWay way, const PartLimits& limits,
                  const HostPieces& pieces, const PartBuffers& buffers);

}  // namespace kvo
