// What answers of the driver say of the device, for one lane.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "copy/cuda_ground.hpp"
#include "copy/cuda_lane_device.hpp"

namespace kvo {

// For the lane's thread.
class CudaLaneFaults {
public:
    explicit CudaLaneFaults(CudaGround& ground) : ground_(ground) {}

    // Of a poll. An answer that is none says nothing about what was asked, so that is asked again; but a device that
    // has given no other for a while takes no new plans.
    void doubt(const char* function, CudaStatus status);
    void trust() { strange_.reset(); }
    bool is_doubting() const noexcept { return strange_.has_value(); }

    enum class Streams : std::uint8_t { running, empty, ended };
    // What becomes of all that both streams were given.
    Streams query_streams(const CudaLaneDevice& device);

private:
    struct Strange {
        std::chrono::steady_clock::time_point since;
        int count = 0;
    };

    CudaGround& ground_;
    std::optional<Strange> strange_;  // since the last sensible answer to a poll
};

}  // namespace kvo
