// How this machine's memory can be had: page sizes, huge pages, NUMA nodes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvo {

struct HugePagePool {
    std::uint64_t page_bytes = 0;
    std::uint64_t total = 0;  // pages the machine has set aside
    std::uint64_t free = 0;
};

struct HostMemory {
    std::uint64_t page_bytes = 0;
    std::vector<HugePagePool> huge_pages;         // by page size, smallest first
    std::string transparent_huge_pages;           // "always", "madvise", "never"; empty: unknown
    std::string transparent_huge_pages_in_shmem;  // the same for memfds, with "within_size", "advise", "deny", "force"
    std::size_t numa_nodes = 1;
};

// Reads the kernel's facts below `sysfs`. Facts that cannot be read keep their defaults, as they are only information.
HostMemory read_host_memory(const std::filesystem::path& sysfs = "/sys");

}  // namespace kvo
