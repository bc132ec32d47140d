// The driver's functions that move bytes, each in the version of its signature that is declared here.
//
// They are found by the driver's own look-up alone (CUDA 11.3 and later): what the loader finds under a plain name,
// such as cuMemAlloc, has a signature long replaced. Members bear the driver's names.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "shim/cuda_driver.hpp"

namespace kvo {

using CudaContext = struct CudaContextTag*;
using CudaStream = struct CudaStreamTag*;
using CudaEvent = struct CudaEventTag*;
using CudaModule = struct CudaModuleTag*;
using CudaFunction = struct CudaFunctionTag*;
using CudaAddress = std::uint64_t;  // CUdeviceptr

inline constexpr CudaStatus kCudaInvalidValue = 1;
inline constexpr CudaStatus kCudaOutOfMemory = 2;
inline constexpr CudaStatus kCudaNotReady = 600;
inline constexpr CudaStatus kCudaNotSupported = 801;

// Refusals because a stream somewhere is being captured. They say nothing about the device, and the call may be made
// again when the capture has ended.
inline constexpr CudaStatus kCudaCaptureUnsupported = 900;
inline constexpr CudaStatus kCudaCaptureWrongThread = 908;
constexpr bool is_capture_refusal(CudaStatus status) {
    return status >= kCudaCaptureUnsupported && status <= kCudaCaptureWrongThread;
}

// Capture mode of a thread: the calls that it may make while another thread captures a stream (CUstreamCaptureMode).
inline constexpr int kCudaCaptureModeGlobal = 0;
inline constexpr int kCudaCaptureModeThreadLocal = 1;
inline constexpr int kCudaCaptureModeRelaxed = 2;

// CUstreamCaptureStatus.
inline constexpr int kCudaCaptureNone = 0;
inline constexpr int kCudaCaptureActive = 1;
inline constexpr int kCudaCaptureInvalidated = 2;

inline constexpr int kCudaMultiprocessorCount = 16;  // CUdevice_attribute

inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventBlockingSync = 1;  // who waits for it sleeps
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr unsigned kCudaHostRegisterPortable = 1;
inline constexpr unsigned kCudaHostRegisterMapped = 2;

// CUmemcpyAttributes of CUDA 12.8. The hints are for managed memory, which is not used.
struct CudaCopyAttributes {
    int source_access_order = kSourceInStreamOrder;
    int source_location_type = 0;
    int source_location = 0;
    int destination_location_type = 0;
    int destination_location = 0;
    unsigned flags = 0;

    // Any other order lets a copy read before the kernels in front of it have written.
    static constexpr int kSourceInStreamOrder = 1;
};

struct CudaApi {
    CudaDriver driver;

    CudaStatus (*cuDevicePrimaryCtxRetain)(CudaContext* context, CudaDeviceId device) = nullptr;
    CudaStatus (*cuDevicePrimaryCtxRelease)(CudaDeviceId device) = nullptr;
    CudaStatus (*cuCtxSetCurrent)(CudaContext context) = nullptr;
    CudaStatus (*cuCtxPushCurrent)(CudaContext context) = nullptr;
    CudaStatus (*cuCtxPopCurrent)(CudaContext* context) = nullptr;
    CudaStatus (*cuCtxGetStreamPriorityRange)(int* least, int* greatest) = nullptr;

    CudaStatus (*cuStreamCreateWithPriority)(CudaStream* stream, unsigned flags, int priority) = nullptr;
    CudaStatus (*cuStreamDestroy)(CudaStream stream) = nullptr;
    CudaStatus (*cuStreamQuery)(CudaStream stream) = nullptr;
    CudaStatus (*cuStreamSynchronize)(CudaStream stream) = nullptr;
    CudaStatus (*cuStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags) = nullptr;
    CudaStatus (*cuStreamIsCapturing)(CudaStream stream, int* capture) = nullptr;
    // Sets the calling thread's mode and gives back what it was.
    CudaStatus (*cuThreadExchangeStreamCaptureMode)(int* mode) = nullptr;

    CudaStatus (*cuEventCreate)(CudaEvent* event, unsigned flags) = nullptr;
    CudaStatus (*cuEventDestroy)(CudaEvent event) = nullptr;
    CudaStatus (*cuEventRecord)(CudaEvent event, CudaStream stream) = nullptr;
    CudaStatus (*cuEventQuery)(CudaEvent event) = nullptr;
    CudaStatus (*cuEventSynchronize)(CudaEvent event) = nullptr;

    CudaStatus (*cuMemAlloc)(CudaAddress* address, std::size_t bytes) = nullptr;
    CudaStatus (*cuMemFree)(CudaAddress address) = nullptr;
    CudaStatus (*cuMemAllocHost)(void** address, std::size_t bytes) = nullptr;
    CudaStatus (*cuMemFreeHost)(void* address) = nullptr;
    CudaStatus (*cuMemHostRegister)(void* address, std::size_t bytes, unsigned flags) = nullptr;
    CudaStatus (*cuMemHostUnregister)(void* address) = nullptr;
    CudaStatus (*cuMemHostGetDevicePointer)(CudaAddress* device_address, void* address, unsigned flags) = nullptr;

    CudaStatus (*cuMemcpyAsync)(CudaAddress destination, CudaAddress source, std::size_t bytes,
                                CudaStream stream) = nullptr;
    // Null before CUDA 12.8.
    CudaStatus (*cuMemcpyBatchAsync)(CudaAddress* destinations, CudaAddress* sources, std::size_t* sizes,
                                     std::size_t count, CudaCopyAttributes* attributes, std::size_t* attribute_starts,
                                     std::size_t attribute_count, std::size_t* failed, CudaStream stream) = nullptr;

    CudaStatus (*cuModuleLoadData)(CudaModule* module, const void* image) = nullptr;
    CudaStatus (*cuModuleUnload)(CudaModule module) = nullptr;
    CudaStatus (*cuModuleGetFunction)(CudaFunction* function, CudaModule module, const char* name) = nullptr;
    CudaStatus (*cuLaunchKernel)(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                 CudaStream stream, void** parameters, void** extra) = nullptr;

    // Does not initialise the driver. Code::unavailable: no library, or functions that it lacks, by name.
    static Result<CudaApi> load(const std::string& library = kCudaLibrary);
};

// Meanings of the driver's statuses: what they say about the work that was given to the device before.

// Whether the context has ended, and all its work with it: every call gives the same answer from then on. That nothing
// of it moves any more is promised nowhere in so many words; but no later call could tell when it has stopped, so it
// has to be taken for said. All other codes are about one call, or not about copies at all: what ran goes on.
constexpr bool is_final(CudaStatus status) {
    constexpr std::array kFinal = {
        4,    // CUDA_ERROR_DEINITIALIZED
        214,  // CUDA_ERROR_ECC_UNCORRECTABLE
        220,  // CUDA_ERROR_NVLINK_UNCORRECTABLE
        226,  // CUDA_ERROR_CONTAINED
        700,  // CUDA_ERROR_ILLEGAL_ADDRESS
        702,  // CUDA_ERROR_LAUNCH_TIMEOUT
        709,  // CUDA_ERROR_CONTEXT_IS_DESTROYED
        710,  // CUDA_ERROR_ASSERT
        714,  // CUDA_ERROR_HARDWARE_STACK_ERROR
        715,  // CUDA_ERROR_ILLEGAL_INSTRUCTION
        716,  // CUDA_ERROR_MISALIGNED_ADDRESS
        717,  // CUDA_ERROR_INVALID_ADDRESS_SPACE
        718,  // CUDA_ERROR_INVALID_PC
        719,  // CUDA_ERROR_LAUNCH_FAILED
        721,  // CUDA_ERROR_TENSOR_MEMORY_LEAK
    };
    return std::ranges::find(kFinal, status) != kFinal.end();
}

}  // namespace kvo
