// Evicts segments of a device, so that there is always an empty one to write to.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "disk/device_condition.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"
#include "disk/mover.hpp"
#include "disk/segment_files.hpp"
#include "disk/segment_io.hpp"
#include "disk/victim.hpp"

namespace kvo {

// The parts that the evictor works on. All of them outlive it.
struct EvictorSeat {
    const DeviceTerms& terms;
    SegmentFiles& files;
    SegmentIo io;
    SharedIndex& index;
    DeviceCounts& counts;
    const DeviceCondition& condition;
    std::function<void(const BatchPointer&)> give;  // a batch of records that are moved
};

// For the device's thread.
class DeviceEvictor {
public:
    explicit DeviceEvictor(EvictorSeat seat);

    // Continues the eviction under way, and begins another one while too few segments are empty.
    void pump();
    // Stops the eviction under way; its segment stays.
    void stop();

    bool is_moving() const noexcept { return mover_.has_value(); }
    bool is_under_way() const noexcept { return mover_ || leaving_; }
    // Notes that so many bytes were put. A share of them may be used to move records.
    void add_put(std::uint64_t bytes) { allowance_.add_put(bytes); }

private:
    void begin();
    std::vector<FooterEntry> choose_moves(std::uint32_t number);
    void end();

    EvictorSeat seat_;
    MoveAllowance allowance_;
    std::optional<std::uint32_t> leaving_;
    std::optional<Mover> mover_;
};

}  // namespace kvo
