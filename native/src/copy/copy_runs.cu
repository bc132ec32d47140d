// Entry points only; the work is in the header.
#include "copy/copy_runs.hpp"

// A grid of any size is right; `team_size` must divide blockDim.x.
extern "C" __global__ void kvo_copy_runs(kvo::CopyRuns runs, std::uint32_t team_size) {
    const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
    const std::uint64_t thread = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    kvo::copy_runs(runs, {thread, threads, team_size});
}

extern "C" __global__ void kvo_fetch(std::uint64_t source, std::uint64_t destination, std::uint64_t length) {
    const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    kvo::fetch(source, destination, length, thread, gridDim.x * blockDim.x);
}
