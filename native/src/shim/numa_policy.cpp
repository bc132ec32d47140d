#include "shim/numa_policy.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <system_error>

#include "base/status.hpp"
#include "shim/host_memory.hpp"

namespace kvo {
namespace {

// Constants of the kernel's linux/mempolicy.h, which build machines need not have.
constexpr int kModePreferred = 1;
constexpr int kModeInterleave = 3;
constexpr unsigned long kFlagMemsAllowed = 4;

constexpr std::size_t kMaskBits = 1024;  // as many nodes as any kernel is built for
constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
using NodeMask = std::array<unsigned long, kMaskBits / kWordBits>;

std::string explain_refusal(const char* call, int error) {
    if (error == EPERM || error == ENOSYS) {
        return std::string(call) + " is not permitted here; container runtimes' default seccomp profiles forbid it " +
               "without CAP_SYS_NICE";
    }
    return std::string(call) + ": " + std::generic_category().message(error);
}

}  // namespace

Result<PlacementPlan> plan_placement(PlacementWish wish, const std::vector<unsigned>& allowed, unsigned current_node,
                                     const std::string& why_unknown) {
    PlacementPlan plan;
    if (allowed.empty()) {
        plan.reason = why_unknown;
        return plan;
    }
    if (wish.placement == Placement::one_node && !std::ranges::binary_search(allowed, wish.node)) {
        return Status(Code::invalid,
                      "NUMA node " + std::to_string(wish.node) + " has no memory or may not be used by this process");
    }
    if (allowed.size() == 1) {
        plan.reason = "this process has one NUMA node";
        return plan;
    }
    plan.is_needed = true;
    if (wish.placement == Placement::interleave) {
        plan.mode = kModeInterleave;
        plan.nodes = allowed;
        return plan;
    }
    plan.mode = kModePreferred;
    plan.nodes = {wish.placement == Placement::one_node ? wish.node : current_node};
    return plan;
}

Result<std::string> place_pages(void* start, std::size_t length, PlacementWish wish) {
    NodeMask mask{};
    std::string why_unknown;
    if (syscall(SYS_get_mempolicy, nullptr, mask.data(), kMaskBits, nullptr, kFlagMemsAllowed) != 0) {
        why_unknown = explain_refusal("get_mempolicy", errno);
    }
    std::vector<unsigned> allowed;
    for (unsigned node = 0; node < kMaskBits; ++node) {
        if ((mask[node / kWordBits] >> (node % kWordBits) & 1) != 0) {
            allowed.push_back(node);
        }
    }
    unsigned current_node = 0;
    syscall(SYS_getcpu, nullptr, &current_node, nullptr);

    const Result<PlacementPlan> planned = plan_placement(wish, allowed, current_node, why_unknown);
    if (!planned.ok()) {
        return planned.fault();
    }
    const PlacementPlan& plan = planned.value();
    if (!plan.is_needed) {
        return plan.reason;
    }
    mask = {};
    for (const unsigned node : plan.nodes) {
        mask[node / kWordBits] |= 1UL << (node % kWordBits);
    }
    // The kernel reads one bit less than it is told.
    if (syscall(SYS_mbind, start, length, plan.mode, mask.data(), kMaskBits + 1, 0UL) != 0) {
        return explain_refusal("mbind", errno);
    }
    return std::string();
}

namespace {

// Constants of the kernel's linux/mempolicy.h, which build machines need not have.
constexpr unsigned long kFlagNode = 1;
constexpr unsigned long kFlagAddress = 2;

constexpr unsigned kCpuMaskBits = 8192;  // as many processors as any kernel is built for
constexpr unsigned kCpuWordBits = sizeof(unsigned long) * CHAR_BIT;
using CpuMask = std::array<unsigned long, kCpuMaskBits / kCpuWordBits>;

bool parse_number(std::string_view text, unsigned& number) {
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
    return fault == std::errc{} && end == text.data() + text.size() && number < kCpuMaskBits;
}

}  // namespace

std::vector<unsigned> thread_cpus() {
    CpuMask mask{};
    std::vector<unsigned> cpus;
    if (syscall(SYS_sched_getaffinity, 0, sizeof mask, mask.data()) < 0) {
        return cpus;
    }
    for (unsigned cpu = 0; cpu < kCpuMaskBits; ++cpu) {
        if ((mask[cpu / kCpuWordBits] >> (cpu % kCpuWordBits) & 1) != 0) {
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
        mask[cpu / kCpuWordBits] |= 1UL << (cpu % kCpuWordBits);
    }
    return syscall(SYS_sched_setaffinity, 0, sizeof mask, mask.data()) == 0;
}

}  // namespace kvo
