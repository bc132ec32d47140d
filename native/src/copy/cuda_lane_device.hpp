// The resources that a lane takes from its device and gives back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "copy/cuda_ground.hpp"
#include "copy/cuda_parts.hpp"

namespace kvo {

// Used by the lane's thread. If opening has failed, close gives back the resources that were taken before.
class CudaLaneDevice {
public:
    explicit CudaLaneDevice(CudaGround& ground) : ground_(ground), api_(ground.api) {}

    // Streams, host memory and events. The context is current from then on.
    Status open();
    // An engine without kernels is slow with small pages, and right: then the ground knows why.
    void open_kernels();
    void close();

    CudaStream kernels() const noexcept { return kernels_; }
    CudaStream transfers() const noexcept { return transfers_; }
    CudaFunction copy_runs() const noexcept { return copy_runs_; }  // null: batch is the only way
    CudaFunction fetch() const noexcept { return fetch_; }

    // Resources for parts; stagings only if there are kernels.
    const std::vector<CudaPlace>& places() const noexcept { return places_; }
    std::vector<CudaBounce> bounces() const;
    std::vector<CudaStaging> stagings() const;
    // The memory of the lists of runs: as the host calls it, as the device calls that, and the device's own.
    std::uint8_t* host_lists() const;
    CudaAddress mapped_lists() const;
    CudaAddress device_lists() const;

private:
    Status open_places();
    Status load_kernels();
    void close_kernels();
    std::uint64_t buffers_bytes() const;

    CudaGround& ground_;
    const CudaApi& api_;
    CudaStream kernels_ = nullptr;
    CudaStream transfers_ = nullptr;
    CudaModule module_ = nullptr;
    CudaFunction copy_runs_ = nullptr;
    CudaFunction fetch_ = nullptr;
    CudaAddress device_memory_ = 0;
    void* host_memory_ = nullptr;
    CudaAddress mapped_memory_ = 0;
    std::vector<CudaPlace> places_;  // with their events, and free
};

}  // namespace kvo
