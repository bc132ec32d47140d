// The compiled kernels, embedded at build time; nothing of the CUDA toolkit is needed to run them.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace kvo {

// A fat binary for cuModuleLoadData; empty if the build had no nvcc.
std::span<const std::byte> kernel_image() noexcept;

// The kernels' formats, such as "sm_90" (machine code) and "ptx_80" (compiled by the driver where no machine code
// fits).
std::vector<std::string_view> kernel_archs();

}  // namespace kvo
