#include "copy/cuda_watch.hpp"

#include <atomic>

#include "check.hpp"
#include "cuda_scene.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;

namespace {

// A stream that is stalled until the test lets it run, and a watch that counts what it is told.
struct Scene {
    explicit Scene(const fake::Settings& settings = {}) : program(FAKE_CUDA, settings) {
        stream = program.open_stream();
        watch = std::move(CudaWatch::start(program.api(), program.context(), [this] { ++told; }).value());
        program.control().stall(true);
    }
    SharedEvent record() {
        SharedEvent event = pool.take().value();
        program.record(event->get(), stream);
        return event;
    }
    void wait_until_told(int times) {
        for (test::Patience patience; told < times;) {
            patience.wait();
        }
    }

    fake::Program program;
    CudaEventPool pool{program.api()};
    CudaStream stream = nullptr;
    std::atomic<int> told{0};
    std::unique_ptr<CudaWatch> watch;
};

}  // namespace

TEST(an_event_is_told_once_when_it_has_come) {
    Scene scene;
    const SharedEvent event = scene.record();
    CHECK(!scene.watch->has_seen(event));
    CHECK(!scene.watch->has_seen(event));
    scene.program.control().stall(false);
    scene.wait_until_told(1);
    CHECK(scene.watch->has_seen(event));
    CHECK_EQUAL(scene.told, 1);
    CHECK_EQUAL(scene.program.control().calls_of("cuEventSynchronize"), 1u);
}

TEST(one_event_is_watched_after_the_other) {
    Scene scene;
    const SharedEvent first = scene.record();
    const SharedEvent second = scene.record();
    CHECK(!scene.watch->has_seen(first));
    for (test::Patience patience; scene.program.control().calls_of("cuEventSynchronize") == 0;) {
        patience.wait();
    }
    CHECK(!scene.watch->has_seen(second));  // although the first one is still waited for
    scene.program.control().stall(false);
    scene.wait_until_told(1);
    for (test::Patience patience; !scene.watch->has_seen(second);) {
        patience.wait();
    }
    CHECK_EQUAL(scene.told, 1);
}

TEST(an_event_that_cannot_be_waited_for_counts_as_seen) {
    Scene scene;
    scene.program.control().arm_fault(
        {.per_mille = 1000, .status = fake::kCaptureUnsupported, .function = "cuEventSynchronize"});
    const SharedEvent event = scene.record();
    scene.watch->has_seen(event);
    scene.wait_until_told(1);
    CHECK(scene.watch->has_seen(event));
    scene.program.control().stall(false);
}

TEST(a_lost_device_ends_the_watch) {
    Scene scene;
    const SharedEvent event = scene.record();
    CHECK(!scene.watch->has_seen(event));
    scene.program.control().lose_device(fake::kIllegalAddress);
    scene.wait_until_told(1);
    scene.watch.reset();
}
