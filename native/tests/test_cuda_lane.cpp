// Plans end correctly when calls to the driver fail.
#include <array>

#include "check.hpp"
#include "cuda_scene.hpp"
#include "shim/cuda_api.hpp"

using namespace kvo;
using test::CudaScene;
using test::kLoad;
using test::kSave;
using test::kWays;
using test::SceneSettings;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kStep = 3;
#else
constexpr std::uint64_t kStep = 1;
#endif

// Counts the objects of the driver that the scene itself holds.
fake::Live live_without_engine(const SceneSettings& settings) { return CudaScene(settings).control().live(); }

// Whether all that was submitted ended well. Then it is also done.
bool is_done(CudaScene& scene, const Result<CopyTicket>& ticket, CopyDirection direction,
             const std::vector<std::uint32_t>& blocks, std::uint64_t pattern) {
    if (!ticket.ok() || !scene.wait_for(ticket.value()).status.ok()) {
        return false;
    }
    CHECK(direction == kSave ? scene.slots_hold(blocks, pattern) : scene.pages_hold(blocks, pattern));
    return true;
}

// A save and a load while one call fails. Whatever comes of them, they end, nothing is lost or left behind, and what is
// said to be done is done. Returns whether the fault struck.
bool run_faulty(const SceneSettings& settings, const fake::Fault& fault, const fake::Live& before) {
    CudaScene scene(settings);
    scene.control().arm_fault(fault);
    if (scene.open().ok()) {
        scene.write_slots({4}, 40);
        scene.write_pages({0, 2}, 10);
        const auto save = scene.try_submit(kSave, {0, 2});
        const auto load = scene.try_submit(kLoad, {4});
        CHECK(scene.engine().fence(test::kPatienceMs));
        const int failed = !is_done(scene, save, kSave, {0, 2}, 10) + !is_done(scene, load, kLoad, {4}, 40);
        CHECK(is_final(fault.status) || (failed <= 1 && !scene.engine().is_lost()));
        if (scene.engine().is_lost()) {
            CHECK(scene.engine().submit(scene.plan(kSave, {1}), {}).fault().code() == Code::unavailable);
        } else if (failed == 1) {
            scene.write_pages({1}, 30);
            CHECK(is_final(fault.status) || is_done(scene, scene.try_submit(kSave, {1}), kSave, {1}, 30));
        }
        CHECK(scene.close(test::kPatienceMs).ok());
    }
    scene.drop_engine();
    CHECK(scene.control().live() == before);
    return scene.control().struck_calls() > 0;
}

}  // namespace

TEST(one_failing_call_fails_a_plan_and_leaves_nothing_behind) {
    constexpr std::array kRefusals = {fake::kInvalidValue, fake::kOutOfMemory, fake::kInvalidContext,
                                      fake::kNotSupported, fake::kCaptureUnsupported};
    for (const CopyWay way : kWays) {
        SceneSettings settings;
        settings.way = way;
        const fake::Live before = live_without_engine(settings);
        std::size_t struck_functions = 0;
        for (const char* function : {"cuInit",
                                     "cuDeviceGet",
                                     "cuDeviceGetAttribute",
                                     "cuDevicePrimaryCtxRetain",
                                     "cuCtxSetCurrent",
                                     "cuCtxGetStreamPriorityRange",
                                     "cuThreadExchangeStreamCaptureMode",
                                     "cuStreamCreateWithPriority",
                                     "cuStreamIsCapturing",
                                     "cuStreamWaitEvent",
                                     "cuStreamQuery",
                                     "cuEventCreate",
                                     "cuEventRecord",
                                     "cuEventQuery",
                                     "cuEventSynchronize",
                                     "cuMemAlloc",
                                     "cuMemAllocHost",
                                     "cuMemHostRegister",
                                     "cuMemHostGetDevicePointer",
                                     "cuMemcpyAsync",
                                     "cuMemcpyBatchAsync",
                                     "cuModuleLoadData",
                                     "cuModuleGetFunction",
                                     "cuLaunchKernel",
                                     "cuStreamDestroy",
                                     "cuEventDestroy",
                                     "cuMemFree",
                                     "cuMemFreeHost",
                                     "cuMemHostUnregister",
                                     "cuModuleUnload",
                                     "cuDevicePrimaryCtxRelease",
                                     "cuCtxPushCurrent",
                                     "cuCtxPopCurrent"}) {
            bool has_struck = true;
            for (std::uint64_t call = 1; has_struck && call <= 40; call += kStep) {
                settings.driver.seed = call;
                const int refusal = kRefusals[call % kRefusals.size()];
                try {
                    has_struck = run_faulty(settings, {.call = call, .status = refusal, .function = function}, before);
                    run_faulty(
                        settings,
                        {.call = call, .status = fake::kLaunchFailed, .loses_device = true, .function = function},
                        before);
                } catch (const std::exception& fault) {
                    test::fail(__FILE__, __LINE__,
                               "way " + std::to_string(static_cast<int>(way)) + ", call " + std::to_string(call) +
                                   " of " + function + " gives " + std::to_string(refusal) + ": " + fault.what());
                }
                struck_functions += has_struck && call == 1 ? 1 : 0;
            }
        }
        // Streams are asked after faults alone, and each way has calls that others do without.
        CHECK(struck_functions >= 25);
    }
}

// Not the call fails but what it asked for, when it runs.
TEST(an_operation_that_fails_takes_the_device_with_it) {
    for (const CopyWay way : kWays) {
        SceneSettings settings;
        settings.way = way;
        const fake::Live before = live_without_engine(settings);
        for (const char* function : {"cuMemcpyBatchAsync", "cuLaunchKernel"}) {
            bool has_struck = true;
            for (std::uint64_t call = 1; has_struck && call <= 20; call += kStep) {
                settings.driver.seed = call;
                settings.has_digests = call % 2 == 0;
                try {
                    has_struck = run_faulty(settings,
                                            {.call = call,
                                             .status = fake::kIllegalAddress,
                                             .kind = fake::FaultKind::operation_fails,
                                             .function = function},
                                            before);
                } catch (const std::exception& fault) {
                    test::fail(__FILE__, __LINE__,
                               "way " + std::to_string(static_cast<int>(way)) + ", operation " + std::to_string(call) +
                                   " of " + function + ": " + fault.what());
                }
                CHECK(has_struck || call > 1 || way != CopyWay::staged);
            }
        }
    }
}

TEST(a_slow_driver_changes_nothing) {
    for (const CopyWay way : kWays) {
        SceneSettings settings;
        settings.way = way;
        CudaScene scene(settings);
        CHECK(scene.open().ok());
        scene.control().arm_fault({.per_mille = 1000, .kind = fake::FaultKind::call_is_slow});
        scene.write_pages({0, 1}, 3);
        const CopyTicket save = scene.submit(kSave, {0, 1});
        const CopyTicket load = scene.submit(kLoad, {4});
        CHECK(scene.wait_for(save).status.ok());
        CHECK(scene.wait_for(load).status.ok());
        CHECK(scene.slots_hold({0, 1}, 3));
        CHECK(scene.control().struck_calls() > 0);
    }
}

TEST(a_plan_that_fails_fails_alone) {
    CudaScene scene(test::with_room(CopyWay::batch));
    CHECK(scene.open().ok());
    scene.control().stall(true);
    scene.write_pages({0}, 1);
    const CopyTicket good = scene.submit(kSave, {0});
    CHECK(scene.engine().make_wait(scene.compute(), good, test::kPatienceMs).ok());
    scene.control().arm_fault({.call = 1, .status = fake::kInvalidValue, .function = "cuMemcpyBatchAsync"});
    const CopyTicket bad = scene.submit(kSave, {1});
    for (test::Patience patience; scene.control().struck_calls() == 0;) {
        patience.wait();
    }
    const CopyTicket later = scene.submit(kSave, {2});
    const CopyTicket load = scene.submit(kLoad, {3});
    CHECK(scene.engine().poll().empty());
    scene.control().stall(false);
    CHECK_EQUAL(scene.wait_for(bad).status.message(), "cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE");
    CHECK(scene.wait_for(good).status.ok());
    CHECK(scene.wait_for(later).status.ok());
    CHECK(scene.wait_for(load).status.ok());
    CHECK(scene.slots_hold({0}, 1));
    CHECK(!scene.engine().is_lost());
}

// A plan that another one's fault makes the lane wait for is not done because the device has ended meanwhile.
TEST(a_loss_while_others_fail_is_a_loss_of_all) {
    for (const CopyWay way : kWays) {
        SceneSettings settings = test::with_room(way);
        settings.has_digests = true;
        CudaScene scene(settings);
        CHECK(scene.open().ok());
        scene.control().stall(true);
        scene.write_pages({0}, 1);
        const CopyTicket first = scene.submit(kSave, {0});
        CHECK(scene.engine().make_wait(scene.compute(), first, test::kPatienceMs).ok());
        scene.control().arm_fault({.per_mille = 1000,
                                   .status = fake::kInvalidValue,
                                   .function = way == CopyWay::batch ? "cuMemcpyBatchAsync" : "cuLaunchKernel"});
        const CopyTicket second = scene.submit(kSave, {1});
        for (test::Patience patience; scene.control().struck_calls() == 0;) {
            patience.wait();
        }
        scene.control().lose_device(fake::kIllegalAddress);
        scene.control().stall(false);
        CHECK(scene.wait_for(first).status.code() == Code::failed);
        CHECK(scene.wait_for(second).status.code() == Code::failed);
        CHECK(scene.engine().is_lost());
        CHECK(scene.engine().close(test::kPatienceMs).ok());
    }
}

// Answers that say nothing do no harm as long as others come between, nor do captures, however long they last.
// One in five: nine such answers in a row, over two milliseconds, would be a loss; a loaded machine takes that long.
TEST(a_device_is_not_lost_lightly) {
    for (const fake::Fault& fault :
         {fake::Fault{.per_mille = 200, .status = fake::kInvalidContext, .function = "cuEventQuery"},
          fake::Fault{.per_mille = 1000, .status = fake::kCaptureUnsupported, .function = "cuEventQuery"}}) {
        CudaScene scene({});
        CHECK(scene.open().ok());
        scene.control().arm_fault(fault);
        scene.control().stall(true);
        // After nothing: a lane that waits for the model does not ask.
        const CopyTicket save = scene.engine().submit(scene.plan(kSave, {0, 1}), {}).value();
        for (test::Patience patience; scene.control().struck_calls() < 1'000;) {
            patience.wait();
        }
        CHECK(!scene.engine().is_lost());
        scene.control().arm_fault({});
        scene.control().stall(false);
        CHECK(scene.wait_for(save).status.ok());
    }
}

// A device that answers nonsense takes no more plans; but what it has may still write, so it does not end.
TEST(what_may_still_move_does_not_end) {
    for (const CopyWay way : kWays) {
        SceneSettings settings;
        settings.way = way;
        CudaScene scene(settings);
        CHECK(scene.open().ok());
        scene.control().stall(true);
        // After nothing: a lane that waits for the model does not ask.
        const CopyTicket save = scene.engine().submit(scene.plan(kSave, {0, 1, 2}), {}).value();
        scene.control().arm_fault({.per_mille = 1000, .status = fake::kInvalidContext, .function = "cuEventQuery"});
        for (test::Patience patience; !scene.engine().is_lost();) {
            patience.wait();
        }
        CHECK(scene.engine().submit(scene.plan(kSave, {3}), {}).fault().code() == Code::unavailable);
        CHECK(!scene.engine().fence(20));
        CHECK(scene.engine().poll().empty());
        CHECK(scene.engine().close(1).code() == Code::failed);
        scene.control().stall(false);
        const FinishedCopy ended = scene.wait_for(save);
        CHECK(ended.status.message().starts_with("the device is lost, cuEventQuery: CUDA_ERROR_INVALID_CONTEXT"));
        CHECK(scene.engine().close(test::kPatienceMs).ok());
    }
}

TEST(a_lost_device_ends_everything) {
    for (const CopyWay way : kWays) {
        SceneSettings settings;
        settings.way = way;
        settings.has_digests = true;
        CudaScene scene(settings);
        CHECK(scene.open().ok());
        scene.control().stall(true);
        const std::array tickets = {scene.submit(kSave, {0, 1}), scene.submit(kLoad, {2}), scene.submit(kLoad, {0}),
                                    scene.submit(kSave, {3})};
        scene.control().lose_device(fake::kIllegalAddress);
        scene.control().stall(false);
        for (const CopyTicket ticket : tickets) {
            const FinishedCopy ended = scene.wait_for(ticket);
            CHECK(ended.status.message().starts_with("the device is lost"));
            CHECK(ended.digests.empty());
        }
        CHECK(scene.engine().is_lost());
        CHECK(scene.engine().close(test::kPatienceMs).ok());
    }
}

TEST(a_plan_cut_short_by_a_close_says_so) {
    for (const CopyWay way : kWays) {
        SceneSettings settings;
        settings.way = way;
        CudaScene scene(settings);
        CHECK(scene.open().ok());
        scene.control().stall(true);
        const CopyTicket save = scene.submit(kSave, {0, 1, 2, 3, 4, 5});  // more parts than the device is given
        for (test::Patience patience; scene.control().calls_of("cuEventQuery") == 0;) {
            patience.wait();
        }
        CHECK(scene.engine().close(1).code() == Code::failed);
        scene.control().stall(false);
        CHECK_EQUAL(scene.wait_for(save).status.message(), "the copy engine was closed during this copy");
        CHECK(scene.engine().close(test::kPatienceMs).ok());
    }
}

TEST(without_its_kernels_an_engine_still_copies) {
    for (const char* function : {"cuModuleLoadData", "cuModuleGetFunction", "cuMemAlloc"}) {
        SceneSettings settings;
        settings.way = CopyWay::staged;
        const fake::Live before = live_without_engine(settings);
        CudaScene scene(settings);
        scene.control().arm_fault({.per_mille = 1000, .status = fake::kOutOfMemory, .function = function});
        CHECK(scene.open().ok());
        CHECK_EQUAL(scene.engine().kernel_problem(), std::string(function) + ": CUDA_ERROR_OUT_OF_MEMORY");
        scene.write_pages({0, 1}, 6);
        CHECK(scene.wait_for(scene.submit(kSave, {0, 1})).status.ok());
        CHECK(scene.slots_hold({0, 1}, 6));
        CHECK(scene.engine().close(test::kPatienceMs).ok());
        CHECK(scene.control().live() == before);
    }
}

TEST(a_plan_that_finds_no_memory_fails_alone) {
    SceneSettings settings;
    settings.way = CopyWay::staged;
    CudaScene scene(settings);
    CHECK(scene.open().ok());
    scene.throw_at_write(2);  // of a list, say
    const CopyTicket bad = scene.submit(kSave, {0, 1, 2, 3});
    CHECK_EQUAL(scene.wait_for(bad).status.message(), "no memory");
    scene.write_pages({0, 1}, 8);
    CHECK(scene.wait_for(scene.submit(kSave, {0, 1})).status.ok());
    CHECK(scene.slots_hold({0, 1}, 8));
}

TEST(final_codes_are_those_that_end_a_context) {
    for (const int status : {700, 719, 214, 709}) {
        CHECK(is_final(status));
    }
    for (const int status : {0, 1, 2, 201, 400, 600, 701, 801, 900, 999}) {
        CHECK(!is_final(status));
    }
}
