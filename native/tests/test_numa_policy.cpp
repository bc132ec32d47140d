#include "shim/numa_policy.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>

#include "check.hpp"

using namespace kvo;

namespace {

using Nodes = std::vector<unsigned>;

constexpr PlacementWish kLocal{Placement::local, 0};
constexpr PlacementWish kInterleave{Placement::interleave, 0};

}  // namespace

TEST(plans_name_the_kernels_mode_and_the_nodes) {
    struct Case {
        PlacementWish wish;
        Nodes allowed;
        unsigned current;
        int mode;
        Nodes nodes;
    };
    const std::vector<Case> cases = {
        {kLocal, {0, 1}, 1, MPOL_PREFERRED, {1}},
        {kInterleave, {0, 1}, 1, MPOL_INTERLEAVE, {0, 1}},
        {kInterleave, {1, 3, 70}, 3, MPOL_INTERLEAVE, {1, 3, 70}},
        {{Placement::one_node, 3}, {1, 3, 70}, 1, MPOL_PREFERRED, {3}},
    };
    for (const Case& each : cases) {
        const Result<PlacementPlan> plan = plan_placement(each.wish, each.allowed, each.current, "");
        CHECK(plan.ok());
        CHECK(plan.value().is_needed);
        CHECK_EQUAL(plan.value().mode, each.mode);
        CHECK(plan.value().nodes == each.nodes);
        CHECK(plan.value().reason.empty());
    }
}

TEST(nothing_is_asked_where_there_is_no_choice) {
    for (const PlacementWish wish : {kLocal, kInterleave, PlacementWish{Placement::one_node, 2}}) {
        const Result<PlacementPlan> plan = plan_placement(wish, {2}, 2, "");
        CHECK(plan.ok());
        CHECK(!plan.value().is_needed);
        CHECK_EQUAL(plan.value().reason, "this process has one NUMA node");
    }
    const Result<PlacementPlan> unknown = plan_placement(kInterleave, {}, 0, "forbidden");
    CHECK(unknown.ok());
    CHECK(!unknown.value().is_needed);
    CHECK_EQUAL(unknown.value().reason, "forbidden");
}

TEST(a_node_that_may_not_be_used_is_refused) {
    CHECK(plan_placement({Placement::one_node, 2}, {0, 1}, 0, "").fault().code() == Code::invalid);
    CHECK(plan_placement({Placement::one_node, 1}, {0}, 0, "").fault().code() == Code::invalid);
}

TEST(the_kernel_takes_the_plan_or_a_reason_is_given) {
    constexpr std::size_t kBytes = 1 << 16;
    void* const start = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    const Result<std::string> interleaved = place_pages(start, kBytes, kInterleave);
    const Result<std::string> local = place_pages(start, kBytes, kLocal);
    munmap(start, kBytes);
    CHECK(interleaved.ok() && local.ok());
    // This holds on any machine: an argument that the kernel does not understand would show as another reason.
    for (const std::string& reason : {interleaved.value(), local.value()}) {
        CHECK(reason.empty() || reason.find("one NUMA node") != std::string::npos ||
              reason.find("not permitted") != std::string::npos);
    }
}
