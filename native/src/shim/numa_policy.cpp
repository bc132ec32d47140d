#include "shim/numa_policy.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <system_error>

#include "shim/system_fault.hpp"

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

}  // namespace kvo
