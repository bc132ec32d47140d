// The parts of plans that are with the device, and the buffers that they use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "copy/cuda_job.hpp"
#include "copy/cuda_part.hpp"
#include "copy/cuda_settings.hpp"
#include "copy/list_ring.hpp"

namespace kvo {

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
