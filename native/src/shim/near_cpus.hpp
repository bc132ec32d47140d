// Which processors are near memory, and keeping a thread on them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

namespace kvo {

// The processors that the calling thread may run on, ascending. Empty if they are not known.
std::vector<unsigned> thread_cpus();

// The processors of the NUMA nodes that these bytes lie on, ascending; addresses without memory are left out. Empty:
// the machine has one node only, or nothing is known.
std::vector<unsigned> cpus_near(std::span<const std::uint64_t> addresses, const std::filesystem::path& sysfs = "/sys");

// The processors of these NUMA nodes, ascending. A node of memory alone has none.
std::vector<unsigned> cpus_of_nodes(const std::vector<unsigned>& nodes, const std::filesystem::path& sysfs = "/sys");

// Returns the processors of `own` that are near, or all of `own` if none is near or nothing is known. A pure function.
std::vector<unsigned> choose_cpus(const std::vector<unsigned>& own, const std::vector<unsigned>& near);

// The numbers in a line such as "0-3,8,10-11". Pure; empty if the line is of another kind.
std::vector<unsigned> parse_cpu_list(std::string_view line);

// Restricts the calling thread to these processors. Returns false, and changes nothing, if the kernel refuses.
bool keep_thread_on(const std::vector<unsigned>& cpus);

}  // namespace kvo
