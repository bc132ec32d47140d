// What a lane takes from its device and gives back, on its own thread.
#include <utility>

#include "copy/cuda_lane.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t kAlignment = 256;

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The first call that fails is the one that is told.
class Calls {
public:
    explicit Calls(const CudaApi& api) : api_(api) {}

    bool did(const char* function, CudaStatus status) {
        if (status != kCudaSuccess) {
            fault_ = Status(Code::failed, std::string(function) + ": " + api_.driver.describe(status));
        }
        return status == kCudaSuccess;
    }
    const Status& fault() const { return fault_; }

private:
    const CudaApi& api_;
    Status fault_;
};

}  // namespace

Status CudaLane::open_device() {
    Calls calls(api_);
    int mode = kCudaCaptureModeRelaxed;
    int least = 0;
    int greatest = 0;
    // Compute has the default priority, which no stream can be below on the devices of today; nor are these above it.
    if (!calls.did("cuThreadExchangeStreamCaptureMode", api_.cuThreadExchangeStreamCaptureMode(&mode)) ||
        !calls.did("cuCtxSetCurrent", api_.cuCtxSetCurrent(ground_.context)) ||
        !calls.did("cuCtxGetStreamPriorityRange", api_.cuCtxGetStreamPriorityRange(&least, &greatest)) ||
        !calls.did("cuStreamCreateWithPriority",
                   api_.cuStreamCreateWithPriority(&kernels_, kCudaStreamNonBlocking, least)) ||
        !calls.did("cuStreamCreateWithPriority",
                   api_.cuStreamCreateWithPriority(&transfers_, kCudaStreamNonBlocking, least))) {
        return calls.fault();
    }
    has_batches_ = api_.cuMemcpyBatchAsync != nullptr;
    if (Status status = open_places(); !status.ok()) {
        return status;
    }
    Result<std::unique_ptr<CudaWatch>> watch = CudaWatch::start(api_, ground_.context, [this] { wake(); });
    if (!watch.ok()) {
        return watch.fault();
    }
    watch_ = std::move(watch.value());
    if (Status status = open_kernels(); !status.ok()) {
        // An engine without kernels is slow with small pages, and right.
        close_kernels();
        const std::lock_guard lock(ground_.mutex);
        ground_.kernel_problem = status.message();
    }
    return {};
}

Status CudaLane::open_places() {
    const CudaSettings& settings = ground_.settings;
    Calls calls(api_);
    const std::uint64_t each = aligned(settings.buffer_bytes);
    CudaAddress mapped = 0;
    if (!calls.did("cuMemAllocHost",
                   api_.cuMemAllocHost(&host_memory_, each * settings.buffers + settings.list_bytes)) ||
        !calls.did("cuMemHostGetDevicePointer", api_.cuMemHostGetDevicePointer(&mapped, host_memory_, 0))) {
        return calls.fault();
    }
    auto* const host = static_cast<std::uint8_t*>(host_memory_);
    for (std::uint32_t i = 0; i < settings.buffers; ++i) {
        bounces_.push_back({host + i * each, mapped + i * each});
    }
    host_lists_ = host + settings.buffers * each;
    mapped_lists_ = mapped + settings.buffers * each;
    lists_.size_bytes = settings.list_bytes;
    places_.resize(settings.parts);
    for (Place& place : places_) {
        if (!calls.did("cuEventCreate", api_.cuEventCreate(&place.crossed, kCudaEventDisableTiming)) ||
            !calls.did("cuEventCreate", api_.cuEventCreate(&place.ended, kCudaEventDisableTiming))) {
            return calls.fault();
        }
    }
    return {};
}

Status CudaLane::open_kernels() {
    const CudaSettings& settings = ground_.settings;
    Calls calls(api_);
    const std::uint64_t each = aligned(settings.buffer_bytes);
    if (settings.kernels.empty()) {
        return {Code::unavailable, "this build has no kernels"};
    }
    if (!calls.did("cuModuleLoadData", api_.cuModuleLoadData(&module_, settings.kernels.data())) ||
        !calls.did("cuMemAlloc", api_.cuMemAlloc(&device_memory_, each * settings.buffers + settings.list_bytes)) ||
        !calls.did("cuModuleGetFunction", api_.cuModuleGetFunction(&copy_runs_, module_, "kvo_copy_runs")) ||
        !calls.did("cuModuleGetFunction", api_.cuModuleGetFunction(&fetch_, module_, "kvo_fetch"))) {
        return calls.fault();
    }
    for (std::uint32_t i = 0; i < settings.buffers; ++i) {
        stagings_.push_back({device_memory_ + i * each});
    }
    device_lists_ = device_memory_ + settings.buffers * each;
    return {};
}

// What a call here and below reports is of earlier work, and everything is given back all the same.
void CudaLane::close_kernels() {
    if (device_memory_ != 0) {
        api_.cuMemFree(device_memory_);
    }
    if (module_ != nullptr) {
        api_.cuModuleUnload(module_);
    }
    device_memory_ = 0;
    module_ = nullptr;
    copy_runs_ = nullptr;
}

void CudaLane::close_device() {
    watch_.reset();
    for (const Place& place : places_) {
        for (const CudaEvent event : {place.crossed, place.ended}) {
            if (event != nullptr) {
                api_.cuEventDestroy(event);
            }
        }
    }
    close_kernels();
    if (host_memory_ != nullptr) {
        api_.cuMemFreeHost(host_memory_);
    }
    for (const CudaStream stream : {kernels_, transfers_}) {
        if (stream != nullptr) {
            api_.cuStreamDestroy(stream);
        }
    }
}

}  // namespace kvo
