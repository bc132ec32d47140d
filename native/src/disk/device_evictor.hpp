// A device's segment is given up, so that there is one to write to.
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

// What it works on, all of which outlives it.
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

    // Goes on, and begins with another segment while too few are empty.
    void pump();
    // The segment that was to go stays.
    void stop();

    bool is_moving() const noexcept { return mover_.has_value(); }
    bool is_under_way() const noexcept { return mover_ || leaving_; }
    // So much was put, of which a share may be moved.
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
