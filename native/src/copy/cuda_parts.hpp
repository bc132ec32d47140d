// The parts of plans that are with the device, and the buffers that they use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "copy/cuda_job.hpp"
#include "copy/cuda_ranges.hpp"
#include "copy/cuda_settings.hpp"
#include "copy/run_list.hpp"

namespace kvo {

// Room for lists that are written in the order in which they are given back. Positions count for ever.

struct ListRing {
    std::uint64_t size_bytes = 0;
    std::uint64_t head = 0;  // the first byte that is free
    std::uint64_t tail = 0;  // the first one that is not, in the ring's last turn

    // Where so many bytes lie in one piece and are free; always found in an empty ring of twice that size.
    std::optional<std::uint64_t> find_room(std::uint64_t bytes) const noexcept {
        const std::uint64_t left = size_bytes - head % size_bytes;
        const std::uint64_t begin = bytes > left ? head + left : head;
        return begin + bytes - tail > size_bytes ? std::nullopt : std::optional(begin);
    }
    std::uint64_t offset_of(std::uint64_t position) const noexcept { return position % size_bytes; }
};

// The part of a plan that is handed to the device at once. Decided here, done by cuda_issue.

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

// Pinned host memory.
struct CudaBounce {
    std::uint8_t* host = nullptr;
    CudaAddress mapped = 0;
    bool is_free = true;
};

struct CudaPlace;

// A buffer on the device, and the part that used it last.
struct CudaStaging {
    CudaAddress address = 0;
    const CudaPlace* last = nullptr;
};

// The resources of one part, from its first call to the driver until the host has seen its end.
struct CudaPlace {
    CudaEvent crossed = nullptr;  // from one stream to the other
    CudaEvent ended = nullptr;
    CudaJob* job = nullptr;
    CudaBounce* bounce = nullptr;
    CudaStaging* staging = nullptr;
    std::uint64_t begin = 0, end = 0;              // of the row
    std::uint64_t lists_begin = 0, lists_end = 0;  // of the ring
    std::uint64_t lists_offset = 0;                // in its memory
    std::size_t transfers = 0;                     // that the driver has queued
    std::shared_ptr<const HostPieces> pieces;      // registered for as long as this is held
};

// The buffers that a part gets in addition to a place.
struct CudaPartRoom {
    CudaBounce* bounce = nullptr;
    CudaStaging* staging = nullptr;
    std::uint64_t lists = 0;

    bool has_buffer() const noexcept { return bounce != nullptr || staging != nullptr; }
    PartBuffers buffers() const;
};

// For the lane's thread. Parts end in the order in which they began.
class CudaParts {
public:
    explicit CudaParts(const CudaSettings& settings) : settings_(settings) {}

    // Sets the resources of all parts, once and for good.
    void open(std::vector<CudaPlace> places, std::vector<CudaBounce> bounces, std::vector<CudaStaging> stagings);

    // Room for a part that goes this way; none: it waits until one has ended.
    std::optional<CudaPartRoom> find_room(CopyWay way, bool is_bounced);
    CudaPlace& begin(CudaJob& job, const CopyPart& part, const CudaPartRoom& room,
                     std::shared_ptr<const HostPieces> pieces);
    // The part is with the device: who uses its buffer there next comes after it.
    void keep_staging(const CudaPlace& place);

    bool is_empty() const noexcept { return count_ == 0; }
    CudaPlace& oldest() { return places_[first_]; }
    // The host has seen the end of the oldest.
    void retire();

private:
    const CudaSettings& settings_;
    std::vector<CudaBounce> bounces_;
    std::vector<CudaStaging> stagings_;
    std::size_t next_staging_ = 0;
    ListRing lists_;  // of runs for kernels: written by the host, fetched to the same place on the device
    std::vector<CudaPlace> places_;
    std::size_t first_ = 0;  // with the device, longest
    std::size_t count_ = 0;
    std::size_t queued_transfers_ = 0;
};

}  // namespace kvo
