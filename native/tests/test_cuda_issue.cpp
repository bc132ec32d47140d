// Which calls a plan becomes, way by way.
#include <algorithm>
#include <array>

#include "check.hpp"
#include "cuda_scene.hpp"

using namespace kvo;
using test::CudaScene;
using test::kLoad;
using test::kSave;
using test::SceneSettings;

TEST(ways_use_what_they_should) {
    struct Case {
        CopyWay way;
        bool uses_kernels;
        int version;
        bool uses_batches;
    };
    for (const Case& expected : {Case{CopyWay::batch, false, 13000, true}, Case{CopyWay::batch, false, 12040, false},
                                 Case{CopyWay::staged, true, 13000, true}, Case{CopyWay::mapped, true, 13000, false}}) {
        for (const CopyDirection direction : {kSave, kLoad}) {
            SceneSettings settings;
            settings.way = expected.way;
            settings.driver.version = expected.version;
            CudaScene scene(settings);
            CHECK(scene.open().ok());
            CHECK(scene.wait_for(scene.submit(direction, {0, 1})).status.ok());
            CHECK_EQUAL(scene.control().calls_of("cuLaunchKernel") > 0, expected.uses_kernels);
            CHECK_EQUAL(scene.control().calls_of("cuMemcpyBatchAsync") > 0, expected.uses_batches);
            // Lists of runs never wait for the DMA engine that the other direction's pages go through.
            CHECK_EQUAL(scene.control().calls_of("cuMemcpyAsync") > 0,
                        !expected.uses_kernels && !expected.uses_batches);
        }
    }
}

TEST(a_device_without_batches_is_given_one_copy_after_the_other) {
    SceneSettings settings;
    CudaScene scene(settings);
    CHECK(scene.open().ok());
    scene.control().arm_fault({.call = 1, .status = fake::kNotSupported, .function = "cuMemcpyBatchAsync"});
    scene.write_pages({0, 1}, 4);
    CHECK(scene.wait_for(scene.submit(kSave, {0, 1})).status.ok());
    CHECK_EQUAL(scene.control().struck_calls(), 1u);
    CHECK(scene.slots_hold({0, 1}, 4));
    CHECK_EQUAL(scene.control().calls_of("cuMemcpyBatchAsync"), 1u);
    CHECK(scene.control().calls_of("cuMemcpyAsync") > 2);
}

// The host waits for nothing while the device's memory lasts: all of a plan in registered memory is handed over at
// once.
TEST(a_plan_is_with_the_device_before_any_of_it_has_moved) {
    for (const CopyWay way : test::kWays) {
        for (const CopyDirection direction : {kSave, kLoad}) {
            CudaScene scene(test::with_room(way));
            CHECK(scene.open().ok());
            scene.control().stall(true);
            const CopyTicket ticket = scene.submit(direction, {0, 1, 2, 3, 4, 5});
            CHECK(scene.engine().make_wait(scene.compute(), ticket, test::kPatienceMs).ok());
            CHECK(!scene.engine().fence(0));
            scene.control().stall(false);
            CHECK(scene.wait_for(ticket).status.ok());
        }
    }
}

// Plans of more parts than there is room for lists: none is written over while its kernel may still read it.
TEST(lists_stay_until_they_are_read) {
    for (const CopyWay way : {CopyWay::staged, CopyWay::mapped}) {
        for (std::uint64_t seed = 1; seed <= 40; ++seed) {
            SceneSettings settings;
            settings.way = way;
            settings.driver.seed = seed;
            settings.registered_bytes = 3 * sizeof(test::HostPage);
            settings.waits_for_registration = true;
            CudaScene scene(settings);
            CHECK(scene.open().ok());
            const std::vector<std::uint32_t> all = {0, 1, 2, 3, 4, 5};
            scene.write_pages(all, seed);
            const CopyTicket save = scene.submit(kSave, all);
            CHECK(scene.wait_for(save).status.ok());
            CHECK(scene.slots_hold(all, seed));
            scene.write_pages(all, 0);
            CHECK(scene.wait_for(scene.submit(kLoad, all)).status.ok());
            CHECK(scene.pages_hold(all, seed));
        }
    }
}

TEST(streams_have_the_lowest_priority_there_is) {
    CudaScene scene({});
    CHECK(scene.open().ok());
    int least = 0;
    int greatest = 0;
    CHECK_EQUAL(scene.program().api().cuCtxGetStreamPriorityRange(&least, &greatest), kCudaSuccess);
    CHECK(least > greatest);
    const std::vector<int> priorities = scene.control().stream_priorities();
    CHECK_EQUAL(priorities.size(), 5u);  // the model's, and two of each lane
    CHECK_EQUAL(std::ranges::count(priorities, least), priorities.front() == least ? 5 : 4);
}

TEST(the_way_is_chosen_from_runs_as_they_are_copied) {
    SceneSettings settings;
    CudaScene scene(settings);
    CHECK(scene.open().ok());
    const auto launches_of_a_save = [&](std::uint64_t run_bytes) {
        const std::uint64_t before = scene.control().calls_of("cuLaunchKernel");
        scene.engine().set_ways({{kSave, run_bytes, UINT64_MAX, CopyWay::mapped}});
        CHECK(scene.wait_for(scene.submit(kSave, {0, 1})).status.ok());
        return scene.control().calls_of("cuLaunchKernel") - before;
    };
    // 1740 bytes in 14 runs, 124 bytes each: blocks touch here and there, but their slots do not.
    CHECK(launches_of_a_save(124) > 0);
    CHECK_EQUAL(launches_of_a_save(123), 0u);
}

TEST(the_table_chooses_by_size_count_and_direction) {
    const std::array rules = {
        WayRule{kSave, 4096, 100, CopyWay::mapped},
        WayRule{kSave, 16384, UINT64_MAX, CopyWay::staged},
        WayRule{kLoad, 8192, UINT64_MAX, CopyWay::staged},
    };
    struct Case {
        CopyDirection direction;
        std::uint64_t run_bytes, runs;
        CopyWay way;
    };
    for (const Case& expected : {Case{kSave, 4096, 100, CopyWay::mapped}, Case{kSave, 4096, 101, CopyWay::staged},
                                 Case{kSave, 4097, 1, CopyWay::staged}, Case{kSave, 16385, 1, CopyWay::batch},
                                 Case{kLoad, 4096, 1, CopyWay::staged}, Case{kLoad, 8193, 1, CopyWay::batch}}) {
        CHECK(choose_way(rules, expected.direction, expected.run_bytes, expected.runs) == expected.way);
    }
}

TEST(without_a_table_small_pages_are_staged) {
    const WayTable table = default_ways();
    for (const CopyDirection direction : {kSave, kLoad}) {
        CHECK(choose_way(table, direction, 4096, 1000) == CopyWay::staged);
        CHECK(choose_way(table, direction, 28672, 1000) == CopyWay::batch);
        CHECK(choose_way(table, direction, 64, 4) == CopyWay::batch);
    }
}
