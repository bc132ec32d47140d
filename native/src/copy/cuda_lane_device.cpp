#include "copy/cuda_lane_device.hpp"

#include <utility>

#include "shim/cuda_api.hpp"

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

Status CudaLaneDevice::open() {
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
    return open_places();
}

void CudaLaneDevice::open_kernels() {
    if (Status status = load_kernels(); !status.ok()) {
        close_kernels();
        const std::lock_guard lock(ground_.mutex);
        ground_.kernel_problem = status.message();
    }
}

Status CudaLaneDevice::open_places() {
    const CudaSettings& settings = ground_.settings;
    Calls calls(api_);
    const std::uint64_t each = aligned(settings.buffer_bytes);
    if (!calls.did("cuMemAllocHost",
                   api_.cuMemAllocHost(&host_memory_, each * settings.buffers + settings.list_bytes)) ||
        !calls.did("cuMemHostGetDevicePointer", api_.cuMemHostGetDevicePointer(&mapped_memory_, host_memory_, 0))) {
        return calls.fault();
    }
    places_.resize(settings.parts);
    for (CudaPlace& place : places_) {
        if (!calls.did("cuEventCreate", api_.cuEventCreate(&place.crossed, kCudaEventDisableTiming)) ||
            !calls.did("cuEventCreate", api_.cuEventCreate(&place.ended, kCudaEventDisableTiming))) {
            return calls.fault();
        }
    }
    return {};
}

Status CudaLaneDevice::load_kernels() {
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
    return {};
}

std::uint64_t CudaLaneDevice::buffers_bytes() const {
    return aligned(ground_.settings.buffer_bytes) * ground_.settings.buffers;
}

std::vector<CudaBounce> CudaLaneDevice::bounces() const {
    const std::uint64_t each = aligned(ground_.settings.buffer_bytes);
    auto* const host = static_cast<std::uint8_t*>(host_memory_);
    std::vector<CudaBounce> bounces;
    for (std::uint32_t i = 0; i < ground_.settings.buffers; ++i) {
        bounces.push_back({host + i * each, mapped_memory_ + i * each});
    }
    return bounces;
}

std::vector<CudaStaging> CudaLaneDevice::stagings() const {
    const std::uint64_t each = aligned(ground_.settings.buffer_bytes);
    std::vector<CudaStaging> stagings;
    for (std::uint32_t i = 0; device_memory_ != 0 && i < ground_.settings.buffers; ++i) {
        stagings.push_back({device_memory_ + i * each});
    }
    return stagings;
}

std::uint8_t* CudaLaneDevice::host_lists() const { return static_cast<std::uint8_t*>(host_memory_) + buffers_bytes(); }

CudaAddress CudaLaneDevice::mapped_lists() const { return mapped_memory_ + buffers_bytes(); }

CudaAddress CudaLaneDevice::device_lists() const { return device_memory_ + buffers_bytes(); }

// Errors that the calls here and below report are of earlier work, and everything is given back all the same.
void CudaLaneDevice::close_kernels() {
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

void CudaLaneDevice::close() {
    for (const CudaPlace& place : places_) {
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

namespace {

constexpr int kStrangeAnswers = 8;

}  // namespace

void CudaGround::lose(const char* function, CudaStatus status) {
    is_lost.store(true);
    const std::string why = std::string("the device is lost, ") + function + ": " + api.driver.describe(status);
    {
        const std::lock_guard lock(mutex);
        if (loss.empty()) {
            loss = why;
        }
    }
    wake_lanes();
}

void CudaLaneFaults::doubt(const char* function, CudaStatus status) {
    const auto now = std::chrono::steady_clock::now();
    if (is_final(status)) {
        ground_.lose(function, status);
    } else if (status == kCudaNotReady || is_capture_refusal(status)) {
        strange_.reset();
    } else {
        strange_ = strange_.value_or(Strange{now});
        const bool is_long = now - strange_->since > ground_.settings.strange_answers;
        if (++strange_->count > kStrangeAnswers && is_long) {
            ground_.lose(function, status);
        }
    }
}

CudaLaneFaults::Streams CudaLaneFaults::query_streams(const CudaLaneDevice& device) {
    Streams found = Streams::empty;
    for (const CudaStream stream : {device.kernels(), device.transfers()}) {
        const CudaStatus status = ground_.api.cuStreamQuery(stream);
        if (status == kCudaSuccess) {
            continue;
        }
        doubt("cuStreamQuery", status);
        if (!is_final(status)) {
            return Streams::running;
        }
        found = Streams::ended;
    }
    return found;
}

}  // namespace kvo
