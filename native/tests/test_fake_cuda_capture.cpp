// Calls that a capture under way forbids, the threads to which it forbids them, and the calls that break it.
#include <array>
#include <functional>
#include <thread>
#include <utility>

#include "check.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;
using fake::Program;

namespace {

constexpr std::size_t kBytes = 4096;

// A capture on one stream, and all that the unsafe calls need.
struct Scene {
    Scene() : program(FAKE_CUDA, {}), control(program.control()), api(program.api()) {
        captured = program.open_stream();
        other = program.open_stream();
        event = program.open_event();
        device = program.allocate_device(kBytes);
        host = program.allocate_host(kBytes);
        CHECK_EQUAL(api.cuModuleLoadData(&module, "image"), kCudaSuccess);
        CHECK_EQUAL(api.cuMemHostRegister(registered.data() + kBytes, kBytes, 0), kCudaSuccess);
    }

    // In a thread with a context, whose mode it sets.
    static void run_thread(Program& program, int mode, const std::function<void()>& body) {
        std::exception_ptr fault;
        std::thread([&] {
            try {
                CHECK_EQUAL(program.api().cuCtxSetCurrent(program.context()), kCudaSuccess);
                CHECK_EQUAL(program.api().cuThreadExchangeStreamCaptureMode(&mode), kCudaSuccess);
                CHECK_EQUAL(mode, kCudaCaptureModeGlobal);  // as every thread begins
                body();
            } catch (...) {
                fault = std::current_exception();
            }
        }).join();
        if (fault) {
            std::rethrow_exception(fault);
        }
    }

    Program program;
    fake::Control& control;
    const CudaApi& api;
    CudaStream captured = nullptr;
    CudaStream other = nullptr;
    CudaEvent event = nullptr;
    CudaAddress device = 0;
    std::uint8_t* host = nullptr;
    CudaModule module = nullptr;
    alignas(kBytes) std::array<std::uint8_t, 2 * kBytes> registered{};
};

struct UnsafeCall {
    const char* name;
    CudaStatus (*make)(Scene& scene);
};

constexpr std::array kUnsafeCalls = {
    UnsafeCall{"cuEventQuery", [](Scene& scene) { return scene.api.cuEventQuery(scene.event); }},
    UnsafeCall{"cuEventSynchronize", [](Scene& scene) { return scene.api.cuEventSynchronize(scene.event); }},
    UnsafeCall{"cuStreamQuery", [](Scene& scene) { return scene.api.cuStreamQuery(scene.other); }},
    UnsafeCall{"cuStreamSynchronize", [](Scene& scene) { return scene.api.cuStreamSynchronize(scene.other); }},
    UnsafeCall{"cuMemAlloc",
               [](Scene& scene) {
                   CudaAddress address = 0;
                   return scene.api.cuMemAlloc(&address, 64);
               }},
    UnsafeCall{"cuMemFree", [](Scene& scene) { return scene.api.cuMemFree(scene.device); }},
    UnsafeCall{"cuMemAllocHost",
               [](Scene& scene) {
                   void* address = nullptr;
                   return scene.api.cuMemAllocHost(&address, 64);
               }},
    UnsafeCall{"cuMemFreeHost", [](Scene& scene) { return scene.api.cuMemFreeHost(scene.host); }},
    UnsafeCall{"cuMemHostRegister",
               [](Scene& scene) { return scene.api.cuMemHostRegister(scene.registered.data(), kBytes, 0); }},
    UnsafeCall{"cuMemHostUnregister",
               [](Scene& scene) { return scene.api.cuMemHostUnregister(scene.registered.data() + kBytes); }},
    UnsafeCall{"cuModuleLoadData",
               [](Scene& scene) {
                   CudaModule module = nullptr;
                   return scene.api.cuModuleLoadData(&module, "image");
               }},
    UnsafeCall{"cuModuleUnload", [](Scene& scene) { return scene.api.cuModuleUnload(scene.module); }},
};

}  // namespace

TEST(an_unsafe_call_is_refused_and_breaks_the_capture_unless_the_thread_is_relaxed) {
    for (const UnsafeCall& call : kUnsafeCalls) {
        for (const int mode : {kCudaCaptureModeGlobal, kCudaCaptureModeThreadLocal, kCudaCaptureModeRelaxed}) {
            Scene scene;
            const fake::Live before = scene.control.live();
            scene.control.begin_capture(scene.captured);
            CudaStatus status = -1;
            Scene::run_thread(scene.program, mode, [&] { status = call.make(scene); });
            const bool is_forbidden = mode == kCudaCaptureModeGlobal;
            if (status != (is_forbidden ? fake::kCaptureUnsupported : kCudaSuccess)) {
                test::fail(__FILE__, __LINE__,
                           std::string(call.name) + ", mode " + std::to_string(mode) + ": " + std::to_string(status));
            }
            CHECK_EQUAL(scene.control.end_capture(scene.captured), is_forbidden);
            CHECK(!is_forbidden || scene.control.live() == before);  // and nothing was given back
        }
    }
}

TEST(a_thread_with_a_capture_of_its_own_is_free_when_it_is_relaxed_only) {
    for (const auto& [mode, expected] : {std::pair{kCudaCaptureModeGlobal, fake::kCaptureUnsupported},
                                         {kCudaCaptureModeThreadLocal, fake::kCaptureUnsupported},
                                         {kCudaCaptureModeRelaxed, kCudaSuccess}}) {
        Scene scene;
        Scene::run_thread(scene.program, mode, [&] {
            scene.control.begin_capture(scene.captured);
            CHECK_EQUAL(scene.api.cuEventQuery(scene.event), expected);
            CHECK_EQUAL(scene.control.end_capture(scene.captured), expected != kCudaSuccess);
        });
    }
}

TEST(other_calls_are_no_matter_to_a_capture) {
    Scene scene;
    scene.control.begin_capture(scene.captured);
    CHECK_EQUAL(scene.api.cuMemcpyAsync(scene.device, fake::address_of_host(scene.host), kBytes, scene.other),
                kCudaSuccess);
    CHECK_EQUAL(scene.api.cuEventRecord(scene.event, scene.other), kCudaSuccess);
    CHECK_EQUAL(scene.api.cuStreamWaitEvent(scene.other, scene.event, 0), kCudaSuccess);
    CudaContext context = nullptr;
    CHECK_EQUAL(scene.api.cuCtxPushCurrent(scene.program.context()), kCudaSuccess);
    CHECK_EQUAL(scene.api.cuCtxPopCurrent(&context), kCudaSuccess);
    scene.program.open_event();
    scene.program.open_stream();
    CHECK(!scene.control.end_capture(scene.captured));
    scene.program.synchronize(scene.other);
}

TEST(what_is_captured_is_not_run) {
    Scene scene;
    const std::array<std::uint8_t, 4> written = {1, 2, 3, 4};
    std::array<std::uint8_t, 4> seen{};
    scene.control.poke(scene.device, written);
    scene.control.begin_capture(scene.captured);
    scene.program.compute(scene.captured, {}, {{scene.device, 4}}, 9);
    CHECK_EQUAL(scene.api.cuMemcpyAsync(scene.device, fake::address_of_host(scene.host), 4, scene.captured),
                kCudaSuccess);
    CHECK(!scene.control.end_capture(scene.captured));
    scene.program.synchronize(scene.captured);
    scene.control.peek(scene.device, seen);
    CHECK(seen == written);
}

TEST(a_stream_tells_its_capture_and_a_broken_one_takes_nothing) {
    Scene scene;
    int capture = -1;
    CHECK_EQUAL(scene.api.cuStreamIsCapturing(scene.captured, &capture), kCudaSuccess);
    CHECK_EQUAL(capture, kCudaCaptureNone);
    scene.control.begin_capture(scene.captured);
    CHECK_EQUAL(scene.api.cuStreamIsCapturing(scene.captured, &capture), kCudaSuccess);
    CHECK_EQUAL(capture, kCudaCaptureActive);
    CHECK_EQUAL(scene.api.cuEventRecord(scene.event, scene.captured), kCudaSuccess);
    CHECK_EQUAL(scene.api.cuMemFree(scene.device), fake::kCaptureUnsupported);
    CHECK_EQUAL(scene.api.cuStreamIsCapturing(scene.captured, &capture), kCudaSuccess);
    CHECK_EQUAL(capture, kCudaCaptureInvalidated);
    CHECK_EQUAL(scene.api.cuEventRecord(scene.event, scene.captured), fake::kCaptureInvalidated);
    CHECK(scene.control.end_capture(scene.captured));
    CHECK_EQUAL(scene.api.cuStreamIsCapturing(scene.captured, &capture), kCudaSuccess);
    CHECK_EQUAL(capture, kCudaCaptureNone);
    CHECK_EQUAL(scene.api.cuMemFree(scene.device), kCudaSuccess);
}

TEST(nobody_may_ask_how_far_a_captured_stream_or_event_is) {
    struct Question {
        CudaStatus (*ask)(Scene& scene);
        CudaStatus expected;
    };
    for (const auto& [ask, expected] : {
             Question{[](Scene& scene) { return scene.api.cuStreamQuery(scene.captured); }, fake::kCaptureUnsupported},
             Question{[](Scene& scene) { return scene.api.cuStreamSynchronize(scene.captured); },
                      fake::kCaptureUnsupported},
             Question{[](Scene& scene) { return scene.api.cuEventQuery(scene.event); }, fake::kCapturedEvent},
             Question{[](Scene& scene) { return scene.api.cuEventSynchronize(scene.event); }, fake::kCapturedEvent},
         }) {
        Scene scene;
        scene.control.begin_capture(scene.captured);
        scene.program.record(scene.event, scene.captured);
        Scene::run_thread(scene.program, kCudaCaptureModeRelaxed, [&] { CHECK_EQUAL(ask(scene), expected); });
        CHECK(scene.control.end_capture(scene.captured));
    }
}

TEST(a_captured_event_stays_one_until_it_is_recorded_elsewhere) {
    Scene scene;
    scene.control.begin_capture(scene.captured);
    scene.program.record(scene.event, scene.captured);
    CHECK(!scene.control.end_capture(scene.captured));
    CHECK_EQUAL(scene.api.cuEventQuery(scene.event), fake::kCapturedEvent);
    scene.program.record(scene.event, scene.other);
    scene.program.poll(scene.event);
}

// A stream that waits for a captured event would become part of the capture; this is never meant.
TEST(no_dependency_crosses_the_border_of_a_capture) {
    Scene scene;
    scene.control.keep_reports(true);
    CudaEvent outside = scene.program.open_event();
    scene.program.record(outside, scene.other);
    scene.control.begin_capture(scene.captured);
    scene.program.record(scene.event, scene.captured);
    CHECK_EQUAL(scene.api.cuStreamWaitEvent(scene.captured, scene.event, 0), kCudaSuccess);
    CHECK_EQUAL(scene.api.cuStreamWaitEvent(scene.other, scene.event, 0), fake::kCaptureIsolation);
    CHECK_EQUAL(scene.control.take_reports().size(), 1u);
    CHECK_EQUAL(scene.api.cuStreamWaitEvent(scene.captured, outside, 0), fake::kCaptureIsolation);
    CHECK(scene.control.end_capture(scene.captured));
    CHECK_EQUAL(scene.api.cuStreamWaitEvent(scene.other, scene.event, 0), fake::kCapturedEvent);
    CHECK_EQUAL(scene.control.take_reports().size(), 1u);
    scene.control.keep_reports(false);
}
