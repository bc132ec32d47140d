// How much more memory this process may take before the kernel reclaims, refuses or kills.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>

#include "base/status.hpp"

namespace kvo {

// Sizes as people read them, in faults.

// Three digits and a unit: 23.5GiB, 128MiB, 5B.
inline std::string describe_size(std::uint64_t bytes) {
    constexpr std::array<const char*, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) {
        return std::to_string(bytes) + "B";
    }
    double count = static_cast<double>(bytes) / 1024;
    std::size_t unit = 0;
    while (count >= 1024 && unit + 1 < kUnits.size()) {
        count /= 1024;
        ++unit;
    }
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), count < 1000 ? "%.3g%s" : "%.0f%s", count, kUnits[unit]);
    return text.data();
}

struct MemoryHeadroom {
    std::uint64_t bytes = UINT64_MAX;  // UINT64_MAX: nothing here sets a bound that can be read
    std::string limited_by;            // the bound and what is used of it, in words; empty where there is none
    // The most that could ever be free, with no memory in use: the machine's memory, or the lowest limit of these
    // cgroups.
    std::uint64_t total_bytes = UINT64_MAX;
};

// The least of: what the machine has available, and what each memory cgroup from ours up to the mount's root has left
// (version 2: memory.max and memory.high, version 1: memory.limit_in_bytes, hybrid machines: both). Clean page cache
// that the kernel would drop counts as free. Cgroups are found by self/cgroup and self/mountinfo below `proc`, so a
// container sees its own. The result is a reading, not a promise: other processes may take the memory a moment later.
// Reads about ten small files, in well under a millisecond.
MemoryHeadroom read_memory_headroom(const std::filesystem::path& proc = "/proc");

// Refuses with Code::unavailable when fewer than `needed` bytes are left; says what was asked and what bounds it.
Status check_memory_headroom(std::uint64_t needed, const std::filesystem::path& proc = "/proc");

}  // namespace kvo
