#include "shim/numa_policy.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "made_up_files.hpp"

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

using namespace kvo::test;

using Cpus = std::vector<unsigned>;

TEST(lists_of_processors_are_read) {
    CHECK(parse_cpu_list("0-3,8,10-11") == Cpus({0, 1, 2, 3, 8, 10, 11}));
    CHECK(parse_cpu_list("5") == Cpus({5}));
    for (const char* line : {"", "x", "1-", "3-1", "1,,2", "-4", "0-999999999", "1 2"}) {
        CHECK(parse_cpu_list(line).empty());
    }
}

TEST(a_thread_stays_on_what_it_may_use) {
    CHECK(choose_cpus({0, 1, 2, 3}, {2, 3, 4}) == Cpus({2, 3}));
    CHECK(choose_cpus({0, 1}, {2, 3}) == Cpus({0, 1}));
    CHECK(choose_cpus({0, 1}, {}) == Cpus({0, 1}));
    CHECK(choose_cpus({}, {1}).empty());
}

TEST(a_thread_is_kept_and_no_other) {
    const Cpus before = thread_cpus();
    CHECK(!before.empty());
    Cpus within;
    std::thread([&] {
        CHECK(keep_thread_on({before.back()}));
        within = thread_cpus();
        CHECK(!keep_thread_on({}));
    }).join();
    CHECK(within == Cpus({before.back()}));
    CHECK(thread_cpus() == before);
}

TEST(processors_of_several_nodes_are_all_of_theirs) {
    const MadeUpFiles sysfs("nodes");
    sysfs.write("devices/system/node/node0/cpulist", "0-1,8");
    sysfs.write("devices/system/node/node1/cpulist", "2-3");
    sysfs.write("devices/system/node/node2/cpulist", "");
    CHECK(cpus_of_nodes({1, 0}, sysfs.root()) == Cpus({0, 1, 2, 3, 8}));
    CHECK(cpus_of_nodes({1, 2, 3}, sysfs.root()) == Cpus({2, 3}));
    CHECK(cpus_of_nodes({2}, sysfs.root()).empty());
}

// A made-up machine of 64 nodes, each with one processor of its own number, so that the answer names the nodes.
TEST(processors_near_memory_are_those_of_its_nodes) {
    const MadeUpFiles sysfs("near_cpus");
    for (int node = 0; node < 64; ++node) {
        const std::string number = std::to_string(node);
        sysfs.write("devices/system/node/node" + number + "/cpulist", number);
    }
    const std::vector<int> memory(100'000, 1);
    const auto here = reinterpret_cast<std::uint64_t>(memory.data());
    constexpr std::uint64_t kNowhere = 8;
    int node = 0;
    const bool is_known =
        syscall(SYS_get_mempolicy, &node, nullptr, 0UL, here, 1UL | 2UL) == 0;  // of the page at `here`
    const Cpus expected = is_known ? Cpus({static_cast<unsigned>(node)}) : Cpus();
    CHECK(cpus_near(std::vector({here}), sysfs.root()) == expected);
    CHECK(cpus_near(std::vector({kNowhere, here, here}), sysfs.root()) == expected);
    CHECK(cpus_near(std::vector({kNowhere}), sysfs.root()).empty());
    CHECK(cpus_near({}, sysfs.root()).empty());
}

TEST(memory_of_a_machine_with_one_node_is_near_to_all) {
    const int here = 0;
    const std::vector addresses = {reinterpret_cast<std::uint64_t>(&here)};
    CHECK(cpus_near(addresses, "/nowhere").empty());
    const MadeUpFiles sysfs("one_node");
    sysfs.write("devices/system/node/node0/cpulist", "0-3");
    CHECK(cpus_near(addresses, sysfs.root()).empty());
}
