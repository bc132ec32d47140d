#include "copy/cuda_events.hpp"

#include <atomic>

#include "check.hpp"
#include "cuda_scene.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;

TEST(an_event_comes_back_with_its_last_handle) {
    fake::Program program(FAKE_CUDA, {});
    CudaEventPool pool(program.api());
    SharedEvent first = pool.take().value();
    const SharedEvent second = pool.take().value();
    CHECK(first->get() != second->get());
    const CudaEvent event = first->get();
    const SharedEvent other_handle = first;
    first.reset();
    CHECK(pool.take().value()->get() != event);
    {
        const SharedEvent last = std::move(other_handle);
    }
    CHECK_EQUAL(program.control().live().events, 3u);
}

TEST(what_is_filled_is_used_and_given_back) {
    fake::Program program(FAKE_CUDA, {});
    CudaEventPool pool(program.api());
    CHECK(pool.fill(5).ok());
    CHECK_EQUAL(program.control().live().events, 5u);
    {
        const SharedEvent used = pool.take().value();
        CHECK_EQUAL(program.control().live().events, 5u);
    }
    pool.destroy();
    CHECK_EQUAL(program.control().live().events, 0u);
}

TEST(a_driver_that_has_none_is_quoted) {
    fake::Program program(FAKE_CUDA, {});
    program.control().exempt_thread(false);
    program.control().arm_fault({.per_mille = 1000, .status = fake::kOutOfMemory});
    CudaEventPool pool(program.api());
    CHECK_EQUAL(pool.take().fault().message(), "cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY");
    CHECK(!pool.fill(1).ok());
    program.control().arm_fault({});
    program.control().exempt_thread(true);
    CHECK(pool.take().ok());
}

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
