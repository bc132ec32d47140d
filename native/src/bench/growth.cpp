#include "bench/growth.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace kvo {
namespace {

// Resident, and not of a file: shared memory counts as a file.
Result<std::uint64_t> read_private_bytes() {
    std::ifstream file("/proc/self/statm");
    std::uint64_t size = 0, resident = 0, shared = 0;
    if (!(file >> size >> resident >> shared) || resident < shared) {
        return Status(Code::unavailable, "/proc/self/statm does not say what this process holds");
    }
    return (resident - shared) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Result<std::vector<GrowthStep>> measure_growth(const LoadShape& shape, std::uint64_t step) {
#if defined(__GLIBC__)
    malloc_trim(0);  // what was freed before would be taken again without being seen
#endif
    const auto before = read_private_bytes();
    if (!before.ok()) {
        return before.fault();
    }
    const auto load = CacheLoad::create(shape);
    if (!load.ok()) {
        return load.fault();
    }
    std::vector<GrowthStep> steps;
    for (std::uint64_t entries = 0; entries < shape.entries;) {
        const std::uint64_t stored = load.value()->store(std::min(step, shape.entries - entries)).done;
        const auto now = read_private_bytes();
        if (stored == 0 || !now.ok()) {
            return stored == 0 ? Status(Code::failed, "the cache takes no more entries") : now.fault();
        }
        entries += stored;
        const std::uint64_t growth = now.value() > before.value() ? now.value() - before.value() : 0;
        steps.push_back({entries, load.value()->stats().index_bytes, growth});
    }
    return steps;
}

}  // namespace kvo
