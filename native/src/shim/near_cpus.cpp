#include "shim/near_cpus.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "shim/host_memory.hpp"

namespace kvo {
namespace {

// Constants of the kernel's linux/mempolicy.h, which build machines need not have.
constexpr unsigned long kFlagNode = 1;
constexpr unsigned long kFlagAddress = 2;

constexpr unsigned kMaskBits = 8192;  // as many processors as any kernel is built for
constexpr unsigned kWordBits = sizeof(unsigned long) * CHAR_BIT;
using CpuMask = std::array<unsigned long, kMaskBits / kWordBits>;

bool parse_number(std::string_view text, unsigned& number) {
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
    return fault == std::errc{} && end == text.data() + text.size() && number < kMaskBits;
}

}  // namespace

std::vector<unsigned> thread_cpus() {
    CpuMask mask{};
    std::vector<unsigned> cpus;
    if (syscall(SYS_sched_getaffinity, 0, sizeof mask, mask.data()) < 0) {
        return cpus;
    }
    for (unsigned cpu = 0; cpu < kMaskBits; ++cpu) {
        if ((mask[cpu / kWordBits] >> (cpu % kWordBits) & 1) != 0) {
            cpus.push_back(cpu);
        }
    }
    return cpus;
}

std::vector<unsigned> cpus_near(std::span<const std::uint64_t> addresses, const std::filesystem::path& sysfs) {
    if (read_host_memory(sysfs).numa_nodes < 2) {
        return {};
    }
    std::set<unsigned> nodes;
    for (const std::uint64_t address : addresses) {
        int node = 0;
        if (syscall(SYS_get_mempolicy, &node, nullptr, 0UL, address, kFlagNode | kFlagAddress) == 0) {
            nodes.insert(static_cast<unsigned>(node));
        }
    }
    return cpus_of_nodes({nodes.begin(), nodes.end()}, sysfs);
}

std::vector<unsigned> cpus_of_nodes(const std::vector<unsigned>& nodes, const std::filesystem::path& sysfs) {
    std::set<unsigned> cpus;
    for (const unsigned node : nodes) {
        std::string line;
        std::ifstream file(sysfs / "devices" / "system" / "node" / ("node" + std::to_string(node)) / "cpulist");
        std::getline(file, line);
        for (const unsigned cpu : parse_cpu_list(line)) {
            cpus.insert(cpu);
        }
    }
    return {cpus.begin(), cpus.end()};
}

std::vector<unsigned> choose_cpus(const std::vector<unsigned>& own, const std::vector<unsigned>& near) {
    std::vector<unsigned> both;
    std::ranges::set_intersection(own, near, std::back_inserter(both));
    return both.empty() ? own : both;
}

std::vector<unsigned> parse_cpu_list(std::string_view line) {
    std::vector<unsigned> cpus;
    while (!line.empty()) {
        const std::string_view part = line.substr(0, line.find(','));
        line.remove_prefix(std::min(part.size() + 1, line.size()));
        const std::size_t dash = std::min(part.find('-'), part.size());
        unsigned first = 0;
        if (!parse_number(part.substr(0, dash), first)) {
            return {};
        }
        unsigned last = first;
        if (dash < part.size() && (!parse_number(part.substr(dash + 1), last) || last < first)) {
            return {};
        }
        for (unsigned cpu = first; cpu <= last; ++cpu) {
            cpus.push_back(cpu);
        }
    }
    return cpus;
}

bool keep_thread_on(const std::vector<unsigned>& cpus) {
    CpuMask mask{};
    for (const unsigned cpu : cpus) {
        mask[cpu / kWordBits] |= 1UL << (cpu % kWordBits);
    }
    return syscall(SYS_sched_setaffinity, 0, sizeof mask, mask.data()) == 0;
}

}  // namespace kvo
