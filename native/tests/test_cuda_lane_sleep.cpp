// When a lane asks the driver and when it sleeps; what it holds on to for what the device has.
#include "check.hpp"
#include "cuda_scene.hpp"

using namespace kvo;
using test::CudaScene;
using test::kLoad;
using test::kSave;
using test::kWays;
using test::SceneSettings;

// However long the model computes, the lanes do not ask how far it is: both sleep, and are told of every event.
TEST(lanes_ask_nothing_while_their_plans_wait_for_the_model) {
    for (const CopyWay way : kWays) {
        SceneSettings settings = test::with_room(way);
        settings.has_digests = true;
        CudaScene scene(settings);
        CHECK(scene.open().ok());
        scene.control().stall(true);
        scene.write_slots({4, 5}, 40);
        scene.write_pages({0, 1, 2}, 10);
        const CopyTicket save = scene.submit(kSave, {0, 1});
        const CopyTicket load = scene.submit(kLoad, {4});
        const auto wait_until_with_device = [&](CopyTicket ticket) {
            CHECK(scene.engine().make_wait(scene.compute(), ticket, test::kPatienceMs).ok());
        };
        wait_until_with_device(save);
        wait_until_with_device(load);
        for (test::Patience patience; scene.control().calls_of("cuEventSynchronize") < 2;) {
            patience.wait();
        }
        CHECK(!scene.engine().fence(20));  // whoever has just looked goes to sleep, and digests are made
        const std::uint64_t queries = scene.control().calls_of("cuEventQuery");
        CHECK(!scene.engine().fence(50));
        CHECK_EQUAL(scene.control().calls_of("cuEventQuery"), queries);
        CHECK_EQUAL(scene.control().calls_of("cuStreamQuery"), 0u);
        CHECK_EQUAL(scene.control().calls_of("cuEventSynchronize"), 2u);

        // Plans that are submitted meanwhile go to the device.
        const CopyTicket later_save = scene.submit(kSave, {2});
        const CopyTicket later_load = scene.submit(kLoad, {5});
        wait_until_with_device(later_save);
        wait_until_with_device(later_load);
        scene.control().stall(false);
        for (const CopyTicket ticket : {save, load, later_save, later_load}) {
            CHECK(scene.wait_for(ticket).status.ok());
        }
        CHECK(scene.slots_hold({0, 1, 2}, 10));
        CHECK(scene.pages_hold({4, 5}, 40));
        CHECK(scene.engine().close(test::kPatienceMs).ok());
    }
}

// The load waits for a plan of the other lane, which waits for the model.
TEST(a_lane_that_waits_for_the_other_one_sleeps_and_is_woken) {
    CudaScene scene(test::with_room(CopyWay::batch));
    CHECK(scene.open().ok());
    scene.control().stall(true);
    scene.write_pages({0}, 10);
    const CopyTicket save = scene.submit(kSave, {0});
    const CopyTicket back = scene.submit(kLoad, {0});
    for (test::Patience patience; scene.control().calls_of("cuEventSynchronize") < 1;) {
        patience.wait();
    }
    CHECK(scene.engine().make_wait(scene.compute(), back, 20).code() == Code::unavailable);
    const std::uint64_t queries = scene.control().calls_of("cuEventQuery");
    CHECK(!scene.engine().fence(50));
    CHECK_EQUAL(scene.control().calls_of("cuEventQuery"), queries);
    scene.control().stall(false);
    CHECK(scene.wait_for(save).status.ok());
    CHECK(scene.wait_for(back).status.ok());
    CHECK(scene.pages_hold({0}, 10));
}

// The driver made for tests reports memory that is unregistered under a copy.
TEST(slots_that_are_removed_stay_registered_for_what_the_device_has) {
    for (const CopyWay way : kWays) {
        SceneSettings settings = test::with_room(way);
        settings.has_digests = true;
        CudaScene scene(settings);
        const std::uint64_t before = scene.control().live().registrations;
        CHECK(scene.open().ok());
        CHECK_EQUAL(scene.control().live().registrations, before + 3);
        scene.control().stall(true);
        scene.write_slots({4}, 40);
        scene.write_pages({0, 1}, 7);
        const CopyTicket save = scene.submit(kSave, {0, 1});
        const CopyTicket load = scene.submit(kLoad, {4});
        for (const CopyTicket ticket : {save, load}) {
            CHECK(scene.engine().make_wait(scene.compute(), ticket, test::kPatienceMs).ok());
        }
        scene.remove_slots();
        CHECK(scene.engine().registration().is_leaving);
        const CopyTicket later = scene.submit(kSave, {2});
        scene.control().stall(false);
        CHECK(scene.wait_for(save).status.ok());
        CHECK(scene.wait_for(load).status.ok());
        CHECK(scene.wait_for(later).status.ok());
        CHECK(scene.slots_hold({0, 1}, 7));
        CHECK(scene.pages_hold({4}, 40));
        for (test::Patience patience; scene.engine().registration().is_leaving;) {
            patience.wait();
        }
        CHECK_EQUAL(scene.control().live().registrations, before);
        CHECK(scene.engine().close(test::kPatienceMs).ok());
    }
}
