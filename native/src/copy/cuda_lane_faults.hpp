// Judges, for one lane, from the driver's answers whether the device is lost.
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

    // Takes a poll's answer other than success. A strange one says nothing about the work, so the lane polls again; but
    // a device that has given no other answer for a while counts as lost and takes no new plans.
    void doubt(const char* function, CudaStatus status);
    void trust() { strange_.reset(); }
    bool is_doubting() const noexcept { return strange_.has_value(); }

    enum class Streams : std::uint8_t { running, empty, ended };
    // The state of all work that both streams were given.
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
