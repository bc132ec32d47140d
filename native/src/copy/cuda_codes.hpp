// Meanings of the driver's statuses: what they say about the work that was given to the device before.
#pragma once

#include <algorithm>
#include <array>

#include "shim/cuda_api.hpp"

namespace kvo {

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
