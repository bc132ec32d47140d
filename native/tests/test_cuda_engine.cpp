#include "copy/cuda_engine.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "check.hpp"
#include "cuda_scene.hpp"

using namespace kvo;
using test::CudaScene;
using test::kLoad;
using test::kSave;
using test::kWays;
using test::SceneSettings;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kSeeds = 250;
#else
constexpr std::uint64_t kSeeds = 1000;
#endif

SceneSettings settings_of(std::uint64_t seed, CopyWay way) {
    SceneSettings settings;
    settings.way = way;
    settings.driver.seed = seed;
    settings.has_digests = seed % 3 == 0;
    settings.registered_bytes = seed % 4 * sizeof(test::HostPage);
    settings.waits_for_registration = seed % 2 == 0;
    settings.driver.version = seed % 5 == 0 ? 12040 : 13000;
    return settings;
}

void check_digests(CudaScene& scene, const FinishedCopy& finished, const CopyPlan& plan, bool has_digests) {
    CHECK_EQUAL(finished.digests.size(), has_digests ? plan.items.size() : 0u);
    for (std::size_t i = 0; i < finished.digests.size(); ++i) {
        const CopyItem& item = plan.items[i];
        const RunDigest expected =
            digest_run({reinterpret_cast<std::uint8_t*>(item.slot), scene.record_bytes(item.group)}, 0);
        CHECK(finished.digests[i] == expected);
    }
}

// Two saves and a load while a model goes on computing; then a load of the blocks that were saved.
void run_model(const SceneSettings& settings) {
    CudaScene scene(settings);
    CHECK(scene.open().ok());
    scene.write_slots({5}, 50);
    scene.write_pages({0, 1}, 10);
    const CopyTicket save = scene.submit(kSave, {1, 0});
    const CopyTicket load = scene.submit(kLoad, {5});
    scene.read_pages({5}, load);

    const FinishedCopy saved = scene.wait_for(save);
    CHECK(saved.status.ok());
    check_digests(scene, saved, scene.plan(kSave, {1, 0}), settings.has_digests);
    CHECK(scene.slots_hold({0, 1}, 10));

    scene.write_pages({0, 1, 3}, 20);
    const CopyTicket save_again = scene.submit(kSave, {3});
    const FinishedCopy loaded = scene.wait_for(load);
    CHECK(loaded.status.ok());
    check_digests(scene, loaded, scene.plan(kLoad, {5}), settings.has_digests);
    CHECK(scene.pages_hold({5}, 50));
    const CopyTicket back = scene.submit(kLoad, {0, 1});
    scene.read_pages({0, 1}, back);
    CHECK(scene.engine().fence(test::kPatienceMs));
    CHECK(scene.wait_for(back).status.ok());
    CHECK(scene.wait_for(save_again).status.ok());
    CHECK(scene.pages_hold({0, 1}, 10));
    CHECK(scene.slots_hold({3}, 20));
    scene.synchronize();
    CHECK(scene.engine().close(test::kPatienceMs).ok());
}

}  // namespace

TEST(the_model_and_its_copies_agree_under_every_seed) {
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
        try {
            run_model(settings_of(seed, kWays[seed % kWays.size()]));
        } catch (const std::exception& fault) {
            test::fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + fault.what());
        }
    }
}

// Blocks 4 and 5 were a former request's and are zeroed at the step's beginning. Then the step's forward computes while
// the load fills them.
TEST(a_load_beside_a_forward_follows_what_came_before_the_forward) {
    for (std::uint64_t seed = 1; seed <= kSeeds / 5; ++seed) {
        CudaScene scene(settings_of(seed, kWays[seed % kWays.size()]));
        CHECK(scene.open().ok());
        scene.write_slots({4, 5}, 40);
        scene.write_pages({3, 4, 5}, 1);
        scene.write_pages({4, 5}, 0);
        SharedEvent point = scene.mark();
        scene.write_pages({0, 1, 2, 3}, 20);
        const CopyTicket load = scene.submit_after(kLoad, {4, 5}, std::move(point));
        const CopyTicket save = scene.submit(kSave, {0, 3});
        CHECK(scene.wait_for(load).status.ok());
        CHECK(scene.pages_hold({4, 5}, 40));
        CHECK(scene.wait_for(save).status.ok());
        CHECK(scene.slots_hold({0, 3}, 20));
        scene.synchronize();
        CHECK(scene.engine().close(test::kPatienceMs).ok());
    }
}

// A load waits only for work before its mark: not for the forward, nor for a kernel that zeroes its blocks too late.
TEST(a_load_that_races_with_a_kernel_behind_its_mark_is_found) {
    for (const CopyWay way : kWays) {
        CudaScene scene(test::with_room(way));
        CHECK(scene.open().ok());
        scene.write_slots({4}, 40);
        SharedEvent point = scene.mark();
        scene.control().keep_reports(true);
        scene.write_pages({4}, 0);
        static_cast<void>(scene.wait_for(scene.submit_after(kLoad, {4}, std::move(point))));
        scene.synchronize();
        const auto reports = scene.control().take_reports();
        scene.control().keep_reports(false);
        CHECK(!reports.empty());
    }
}

TEST(a_mark_is_its_engines_own) {
    CudaScene scene({});
    CHECK(scene.open().ok());
    CudaEventPool pool(scene.program().api());
    CHECK(scene.engine().submit_after(scene.plan(kSave, {0}), pool.take().value()).fault().code() == Code::invalid);
    CHECK(scene.wait_for(scene.submit_after(kSave, {0}, nullptr)).status.ok());
    CHECK(scene.engine().close(test::kPatienceMs).ok());
    CHECK(scene.engine().mark(scene.compute()).fault().code() == Code::unavailable);
}

TEST(close_waits_within_its_bound_and_frees_nothing_under_a_copy) {
    for (const CopyWay way : kWays) {
        SceneSettings settings;
        settings.way = way;
        settings.waits_for_registration = true;
        CudaScene scene(settings);
        const fake::Live before = scene.control().live();
        CHECK(scene.open().ok());
        scene.control().stall(true);
        scene.write_pages({0}, 9);
        const CopyTicket running = scene.submit(kSave, {0});
        // All of it is with the device, or waits for a buffer that is.
        static_cast<void>(scene.engine().make_wait(scene.compute(), running, 20));
        const CopyTicket queued = scene.submit(kLoad, {0});
        CHECK(scene.engine().close(1).code() == Code::failed);
        CHECK(scene.engine().submit(scene.plan(kSave, {1}), {}).fault().code() == Code::unavailable);
        CHECK(scene.control().live().host_allocations > before.host_allocations);
        CHECK(scene.wait_for(queued).status.code() == Code::failed);
        CHECK(!scene.engine().fence(0));

        scene.control().stall(false);
        CHECK(scene.engine().close(test::kPatienceMs).ok());
        const Status status = scene.wait_for(running).status;
        CHECK(status.ok() ? scene.slots_hold({0}, 9) : status.code() == Code::failed);
        CHECK(scene.control().live() == before);
        CHECK(scene.engine().close(0).ok());
    }
}

TEST(two_may_close_at_once) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        CudaScene scene(settings_of(seed, kWays[seed % kWays.size()]));
        const fake::Live before = scene.control().live();
        CHECK(scene.open().ok());
        scene.submit(kSave, {0, 1, 2});
        std::thread other([&] { CHECK(scene.engine().close(test::kPatienceMs).ok()); });
        CHECK(scene.engine().close(test::kPatienceMs).ok());
        other.join();
        CHECK(scene.control().live() == before);
        CHECK_EQUAL(scene.engine().poll().size(), 1u);
    }
}

// While one thread submits, another closes: what was taken ends, and nothing is taken afterwards.
TEST(what_is_submitted_beside_a_close_ends) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        CudaScene scene(settings_of(seed, kWays[seed % kWays.size()]));
        const fake::Live before = scene.control().live();
        CHECK(scene.open().ok());
        std::size_t taken = 0;
        std::thread submits([&] {
            // This thread has no context of its own.
            while (taken < 16) {
                const std::uint32_t block = static_cast<std::uint32_t>(taken % 6);
                const auto ticket = scene.engine().submit(scene.plan(kLoad, {block}), scene.compute());
                if (!ticket.ok()) {
                    break;
                }
                static_cast<void>(scene.engine().make_wait(scene.compute(), ticket.value(), 0));
                ++taken;
            }
        });
        CHECK(scene.engine().close(test::kPatienceMs).ok());
        submits.join();
        CHECK(scene.control().live() == before);
        CHECK(scene.engine().fence(0));
        CHECK_EQUAL(scene.engine().poll().size(), taken);
    }
}

TEST(a_thread_without_a_context_is_served) {
    CudaScene scene({});
    CHECK(scene.open().ok());
    scene.write_pages({0}, 4);
    CopyTicket ticket = 0;
    std::thread bare([&] {
        ticket = scene.submit(kSave, {0});
        CHECK(scene.engine().make_wait(scene.compute(), ticket, test::kPatienceMs).ok());
    });
    bare.join();
    CHECK(scene.wait_for(ticket).status.ok());
    CHECK(scene.slots_hold({0}, 4));
}

TEST(a_failed_plan_is_nothing_to_wait_for) {
    CudaScene scene({});
    CHECK(scene.open().ok());
    scene.control().arm_fault({.call = 1, .function = "cuMemcpyBatchAsync"});
    const CopyTicket load = scene.submit(kLoad, {0});
    CHECK(scene.engine().fence(test::kPatienceMs));
    const Status waited = scene.engine().make_wait(scene.compute(), load, 0);
    CHECK_EQUAL(waited.message(), "cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE");
    CHECK_EQUAL(scene.wait_for(load).status.message(), waited.message());
    CHECK(scene.engine().make_wait(scene.compute(), load, 0).code() == Code::invalid);
}

TEST(a_closed_engine_takes_nothing_and_touches_nothing) {
    CudaScene scene({});
    const fake::Live before = scene.control().live();
    CHECK(scene.open().ok());
    const CopyTicket save = scene.submit(kSave, {0});
    CHECK(scene.engine().close(test::kPatienceMs).ok());
    const std::uint64_t pushes = scene.control().calls_of("cuCtxPushCurrent");
    CHECK(scene.engine().submit(scene.plan(kSave, {0}), scene.compute()).fault().code() == Code::unavailable);
    CHECK(scene.engine().add_host_range(4096, 4096).code() == Code::unavailable);
    CHECK(scene.engine().remove_host_range(4096, 4096).code() == Code::unavailable);
    CHECK(scene.engine().make_wait(scene.compute(), save, 0).code() == Code::unavailable);
    CHECK_EQUAL(scene.control().calls_of("cuCtxPushCurrent"), pushes);
    CHECK(scene.control().live() == before);
}

TEST(the_queue_has_a_bound) {
    CudaScene scene({});
    CHECK(scene.open().ok());
    std::vector<CopyTicket> tickets;
    for (int i = 0; i < 16; ++i) {
        tickets.push_back(scene.submit(kSave, {0}));
        CHECK(scene.engine().fence(test::kPatienceMs));
    }
    CHECK(scene.engine().submit(scene.plan(kSave, {0}), {}).fault().code() == Code::unavailable);
    CHECK(scene.wait_for(tickets.front()).status.ok());
    scene.submit(kSave, {0});
}

TEST(wrong_plans_pages_and_settings_are_refused) {
    CudaScene scene({});
    CHECK(scene.open().ok());
    CHECK(scene.engine().submit(scene.plan(kLoad, {0, 0}), {}).fault().code() == Code::invalid);
    CHECK(scene.engine().submit(scene.plan(kSave, {test::kBlocks}), {}).fault().code() == Code::invalid);
    CHECK(scene.engine().make_wait(scene.compute(), 99, 0).code() == Code::invalid);
    CudaSettings settings = scene.engine_settings();
    settings.kernel_threads = 33;
    CHECK(CudaEngine::open(scene.program().api(), settings, scene.pages()).fault().code() == Code::invalid);
    PageTable gap = scene.pages();
    gap.groups[0].record_bytes += 1;
    CHECK(CudaEngine::open(scene.program().api(), scene.engine_settings(), gap).fault().code() == Code::invalid);
}

TEST(a_plan_without_bytes_comes_after_its_stream_too) {
    CudaScene scene({});
    CHECK(scene.open().ok());
    scene.control().stall(true);
    scene.write_pages({0}, 1);
    const CopyTicket empty = scene.submit(kSave, {});
    CHECK(scene.engine().make_wait(scene.compute(), empty, test::kPatienceMs).ok());
    CHECK(!scene.engine().fence(0));
    scene.control().stall(false);
    CHECK(scene.wait_for(empty).status.ok());
    CHECK(scene.engine().make_wait(scene.compute(), empty, 0).code() == Code::invalid);  // told
}

TEST(what_a_plan_waited_for_is_not_the_time_that_it_was_copied) {
    for (const CopyWay way : kWays) {
        CudaScene scene(test::with_room(way));
        CHECK(scene.open().ok());
        scene.control().stall(true);
        scene.write_slots({0, 1}, 5);
        scene.write_pages({0, 1}, 9);
        std::vector<CopyTicket> tickets = {scene.submit(kLoad, {0}), scene.submit(kLoad, {1})};
        // All of both is with the device, behind the model.
        CHECK(scene.engine().make_wait(scene.compute(), tickets[1], test::kPatienceMs).ok());
        const auto freed = std::chrono::steady_clock::now();
        scene.control().stall(false);
        std::chrono::nanoseconds copied{0};
        for (const CopyTicket ticket : tickets) {
            const FinishedCopy finished = scene.wait_for(ticket);
            CHECK(finished.status.ok());
            copied += finished.copied;
        }
        CHECK(copied.count() > 0);
        CHECK(copied <= std::chrono::steady_clock::now() - freed);
    }
}

// A model that captures a graph, in the mode that is the default: nothing that the engine does meanwhile breaks it.
TEST(a_capture_under_way_is_not_broken) {
    for (const CopyWay way : kWays) {
        SceneSettings settings;
        settings.way = way;
        settings.registered_bytes = 0;
        CudaScene scene(settings);
        CHECK(scene.open().ok());
        const CudaStream captured = scene.program().open_stream();
        scene.control().begin_capture(captured);
        scene.register_slots(2 * sizeof(test::HostPage));
        scene.write_pages({0, 1}, 7);
        const CopyTicket save = scene.submit(kSave, {0, 1});
        CHECK(scene.wait_for(save).status.ok());
        const auto stream = reinterpret_cast<ComputeStream>(captured);
        const Status refused = scene.engine().submit(scene.plan(kSave, {2}), stream).fault();
        CHECK(refused.message().find("being captured") != std::string::npos);
        const CopyTicket load = scene.submit(kLoad, {5});
        CHECK(scene.engine().make_wait(stream, load, test::kPatienceMs).message() == refused.message());
        CHECK(scene.wait_for(load).status.ok());
        CHECK_EQUAL(scene.engine().registration().registered_bytes, 2 * sizeof(test::HostPage));
        CHECK(!scene.control().end_capture(captured));
        CHECK(scene.slots_hold({0, 1}, 7));
    }
}

TEST(a_child_of_the_process_is_refused_and_breaks_nothing) {
    CudaScene scene({});
    CHECK(scene.open().ok());
    const CopyTicket save = scene.submit(kSave, {0});
    const pid_t child = fork();
    if (child == 0) {
        CudaEngine& engine = scene.engine();
        const bool is_refused = engine.submit(scene.plan(kSave, {0}), {}).fault().code() == Code::unavailable &&
                                engine.make_wait(0, save, 0).code() == Code::unavailable &&
                                engine.add_host_range(4096, 4096).code() == Code::unavailable;
        const bool is_silent = engine.poll().empty() && !engine.fence(0) && engine.close(0).ok();
        scene.drop_engine();
        _exit(is_refused && is_silent ? 0 : 1);
    }
    int status = 0;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(scene.wait_for(save).status.ok());
}

// The checker sees through the engine: callers that do not keep their side are reported, whatever the way.
TEST(a_model_that_does_not_wait_is_reported) {
    for (const CopyWay way : kWays) {
        for (std::uint64_t seed = 1; seed <= 10; ++seed) {
            CudaScene scene(settings_of(seed, way));
            const CudaStream other = scene.program().open_stream();
            scene.control().keep_reports(true);
            CHECK(scene.open().ok());
            scene.write_pages({0}, 1);
            const CopyTicket save = scene.engine().submit(scene.plan(kSave, {0}), {}).value();
            CHECK(scene.wait_for(save).status.ok());
            scene.synchronize();
            CHECK(!scene.control().take_reports().empty());

            const CopyTicket load = scene.submit(kLoad, {3});
            CHECK(scene.engine().make_wait(reinterpret_cast<ComputeStream>(other), load, test::kPatienceMs).ok());
            scene.write_pages({3}, 2);
            CHECK(scene.wait_for(load).status.ok());
            scene.synchronize();
            CHECK(!scene.control().take_reports().empty());
            CHECK(scene.engine().close(test::kPatienceMs).ok());
            scene.control().keep_reports(false);
        }
    }
}
