#include "shim/cuda_api.hpp"

#include "check.hpp"
#include "fake_cuda/fake_control.hpp"

using namespace kvo;

namespace {

fake::Control& control() {
    fake::Control* const door = fake::open_control(FAKE_CUDA);
    CHECK(door != nullptr);
    return *door;
}

}  // namespace

TEST(every_function_is_found_in_its_version) {
    control().reset({});
    const auto api = CudaApi::load(FAKE_CUDA);
    CHECK(api.ok());
    CHECK(api.value().cuMemcpyBatchAsync != nullptr);
}

TEST(contexts_are_a_stack_of_the_thread) {
    control().reset({});
    const CudaApi api = CudaApi::load(FAKE_CUDA).value();
    CudaContext context = nullptr;
    CudaContext popped = nullptr;
    CHECK_EQUAL(api.cuCtxPopCurrent(&popped), fake::kInvalidContext);
    CHECK_EQUAL(api.cuCtxPushCurrent(context), fake::kInvalidContext);
    CHECK_EQUAL(api.cuDevicePrimaryCtxRetain(&context, 10), kCudaSuccess);
    CHECK_EQUAL(api.cuCtxPushCurrent(context), kCudaSuccess);
    CHECK_EQUAL(api.cuCtxPushCurrent(context), kCudaSuccess);
    CHECK_EQUAL(api.cuCtxSetCurrent(nullptr), kCudaSuccess);  // takes one off
    CHECK_EQUAL(api.cuCtxPopCurrent(&popped), kCudaSuccess);
    CHECK(popped == context);
    CHECK_EQUAL(api.cuCtxPopCurrent(&popped), fake::kInvalidContext);
    control().reset({});
}

TEST(capture_modes_and_attributes_have_the_drivers_numbers) {
    control().reset({});
    const CudaApi api = CudaApi::load(FAKE_CUDA).value();
    int mode = kCudaCaptureModeRelaxed;
    CHECK_EQUAL(api.cuThreadExchangeStreamCaptureMode(&mode), kCudaSuccess);
    CHECK_EQUAL(mode, kCudaCaptureModeGlobal);
    CHECK_EQUAL(api.cuThreadExchangeStreamCaptureMode(&mode), kCudaSuccess);
    CHECK_EQUAL(mode, kCudaCaptureModeRelaxed);
    mode = 3;
    CHECK_EQUAL(api.cuThreadExchangeStreamCaptureMode(&mode), kCudaInvalidValue);
    int count = 0;
    CHECK_EQUAL(api.driver.cuDeviceGetAttribute(&count, kCudaMultiprocessorCount, 10), kCudaSuccess);
    CHECK(count > 0);
    CHECK(!is_capture_refusal(899) && is_capture_refusal(900) && is_capture_refusal(908) && !is_capture_refusal(909));
    control().reset({});
}

// A driver gives the newest signature up to the version asked for; 13.0 replaced the one that is declared here.
TEST(the_batch_copy_is_of_the_version_declared) {
    for (const auto& [version, has_batch] : {std::pair{12040, false}, {12080, true}, {13000, true}}) {
        fake::Settings settings;
        settings.version = version;
        control().reset(settings);
        const auto api = CudaApi::load(FAKE_CUDA);
        CHECK(api.ok());
        CHECK_EQUAL(api.value().cuMemcpyBatchAsync != nullptr, has_batch);
    }
    const CudaApi api = CudaApi::load(FAKE_CUDA).value();
    CudaContext context = nullptr;
    CHECK_EQUAL(api.cuDevicePrimaryCtxRetain(&context, 10), kCudaSuccess);
    CHECK_EQUAL(api.cuCtxSetCurrent(context), kCudaSuccess);
    CudaStream stream = nullptr;
    CHECK_EQUAL(api.cuStreamCreateWithPriority(&stream, kCudaStreamNonBlocking, 0), kCudaSuccess);
    CudaAddress device = 0;
    void* host = nullptr;
    CHECK_EQUAL(api.cuMemAlloc(&device, 64), kCudaSuccess);
    CHECK_EQUAL(api.cuMemAllocHost(&host, 64), kCudaSuccess);
    CudaAddress source = reinterpret_cast<CudaAddress>(host);
    std::size_t size = 64;
    std::size_t start = 0;
    std::size_t failed = 0;
    CudaCopyAttributes attributes;
    // This argument would be the stream in the other signature.
    CHECK_EQUAL(api.cuMemcpyBatchAsync(&device, &source, &size, 1, &attributes, &start, 1, &failed, stream),
                kCudaSuccess);
    CHECK_EQUAL(failed, SIZE_MAX);
    CHECK_EQUAL(api.cuStreamSynchronize(stream), kCudaSuccess);
    control().reset({});
}

TEST(names_what_a_driver_lacks) {
    fake::Settings settings;
    settings.missing = {"cuMemHostRegister", "cuLaunchKernel"};
    control().reset(settings);
    const auto api = CudaApi::load(FAKE_CUDA);
    CHECK(!api.ok());
    CHECK(api.fault().code() == Code::unavailable);
    CHECK(api.fault().message().ends_with("lacks cuMemHostRegister, cuLaunchKernel"));
    control().reset({});
}

TEST(says_when_there_is_no_driver_or_too_old_a_one) {
    CHECK(CudaApi::load("libkvoffload_no_such_driver.so.1").fault().code() == Code::unavailable);
    const auto older = CudaApi::load(DRIVER_STUB_OLDER);
    CHECK(!older.ok());
    CHECK(older.fault().message().ends_with("is of a driver before CUDA 11.3"));
}
