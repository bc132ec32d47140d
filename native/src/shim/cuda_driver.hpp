// NVIDIA's driver library, opened at run time: what is built here needs no CUDA, and runs where there is none.
//
// The declarations are the part of the driver's stable C interface that we use, written here so that no header of the
// toolkit is needed. Members of CudaDriver bear the driver's own names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"

namespace kvo {

using CudaStatus = int;    // CUresult; 0 is success
using CudaDeviceId = int;  // CUdevice

inline constexpr const char* kCudaLibrary = "libcuda.so.1";
inline constexpr CudaStatus kCudaSuccess = 0;

struct CudaDevice {
    std::string name;
    int compute_major = 0;
    int compute_minor = 0;
};

struct CudaDriver {
    CudaStatus (*cuInit)(unsigned flags) = nullptr;
    CudaStatus (*cuDriverGetVersion)(int* version) = nullptr;
    CudaStatus (*cuGetErrorName)(CudaStatus status, const char** name) = nullptr;
    CudaStatus (*cuDeviceGet)(CudaDeviceId* device, int ordinal) = nullptr;
    CudaStatus (*cuDeviceGetCount)(int* count) = nullptr;
    CudaStatus (*cuDeviceGetName)(char* name, int capacity, CudaDeviceId device) = nullptr;
    CudaStatus (*cuDeviceGetAttribute)(int* value, int attribute, CudaDeviceId device) = nullptr;

    // Opens the library and finds every function above, or says what is missing. Does not initialise the driver, so
    // a process may still fork afterwards.
    static Result<CudaDriver> load(const std::string& library = kCudaLibrary);

    // 13000 is CUDA 13.0. Does not initialise the driver.
    Result<int> version() const;

    // Initialises the driver in this process (cuInit), though it makes no context: children forked after this cannot
    // use CUDA. May block for seconds.
    Result<std::vector<CudaDevice>> probe_devices() const;

    // The status as the driver calls it, such as CUDA_ERROR_NO_DEVICE.
    std::string describe(CudaStatus status) const;
};

struct CudaFindings {
    std::optional<int> version;
    std::optional<std::vector<CudaDevice>> devices;  // none: not probed, or not to be had
    std::string problem;                             // the first thing that failed; empty if nothing did
};

// Finds the driver's version and its devices, for the list of capabilities. Initialises the driver only to probe
// devices.
CudaFindings find_cuda(bool probe_devices, const std::string& library = kCudaLibrary);

}  // namespace kvo
