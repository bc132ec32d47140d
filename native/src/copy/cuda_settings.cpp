#include "copy/cuda_settings.hpp"

#include <algorithm>
#include <array>

namespace kvo {

std::uint32_t choose_kernel_blocks(int multiprocessors, std::uint32_t most) {
    constexpr int kComputeShare = 8;
    return std::clamp(static_cast<std::uint32_t>(std::max(multiprocessors, 0) / kComputeShare), 1u, most);
}

Status check_settings(const CudaSettings& settings) {
    const std::array<std::uint64_t, 11> at_least_one = {
        settings.limits.plans, settings.buffer_bytes,  settings.buffers,         settings.kernel_entries,
        settings.list_bytes,   settings.batch_entries, settings.parts,           settings.kernel_blocks,
        settings.batch_bytes,  settings.piece_bytes,   settings.queued_transfers};
    if (std::ranges::find(at_least_one, 0u) != at_least_one.end()) {
        return {Code::invalid, "a CUDA engine's limits are all at least 1"};
    }
    if (settings.kernel_threads == 0 || settings.kernel_threads % 32 != 0 || settings.kernel_threads > 1024) {
        return {Code::invalid, "kernel_threads is a multiple of 32, up to 1024"};
    }
    if (settings.list_bytes / kListEntryBytes / 2 < settings.kernel_entries) {
        return {Code::invalid, "list_bytes must hold the runs of two kernels, 24 bytes each"};
    }
    return {};
}

}  // namespace kvo
