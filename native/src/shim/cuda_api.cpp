#include "shim/cuda_api.hpp"

#include "shim/dynamic_library.hpp"

namespace kvo {
namespace {

using FindFunction = CudaStatus (*)(const char* symbol, void** address, int version, std::uint64_t flags, int* reason);
using FindFunctionBefore12 = CudaStatus (*)(const char* symbol, void** address, int version, std::uint64_t flags);

class FunctionTable {
public:
    explicit FunctionTable(const DynamicLibrary& library)
        : find_(reinterpret_cast<FindFunction>(library.find("cuGetProcAddress_v2"))),
          find_before_12_(reinterpret_cast<FindFunctionBefore12>(library.find("cuGetProcAddress"))) {}

    bool is_there() const { return find_ != nullptr || find_before_12_ != nullptr; }

    // `since`: the CUDA version that brought this signature; a newer one is not given.
    template <typename Function>
    bool load_optional(Function& function, const char* symbol, int since) {
        void* address = nullptr;
        int reason = 0;
        const CudaStatus status =
            find_ != nullptr ? find_(symbol, &address, since, 0, &reason) : find_before_12_(symbol, &address, since, 0);
        function = status == kCudaSuccess ? reinterpret_cast<Function>(address) : nullptr;
        return function != nullptr;
    }

    template <typename Function>
    void load(Function& function, const char* symbol, int since) {
        if (!load_optional(function, symbol, since)) {
            missing_ += missing_.empty() ? symbol : std::string(", ") + symbol;
        }
    }

    const std::string& missing() const { return missing_; }

private:
    FindFunction find_;
    FindFunctionBefore12 find_before_12_;
    std::string missing_;
};

void load_functions(CudaApi& api, FunctionTable& functions) {
    functions.load(api.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000);
    functions.load(api.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 11000);
    functions.load(api.cuCtxSetCurrent, "cuCtxSetCurrent", 4000);
    functions.load(api.cuCtxPushCurrent, "cuCtxPushCurrent", 4000);
    functions.load(api.cuCtxPopCurrent, "cuCtxPopCurrent", 4000);
    functions.load(api.cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", 5050);
    functions.load(api.cuStreamCreateWithPriority, "cuStreamCreateWithPriority", 5050);
    functions.load(api.cuStreamDestroy, "cuStreamDestroy", 4000);
    functions.load(api.cuStreamQuery, "cuStreamQuery", 2000);
    functions.load(api.cuStreamSynchronize, "cuStreamSynchronize", 2000);
    functions.load(api.cuStreamWaitEvent, "cuStreamWaitEvent", 3020);
    functions.load(api.cuStreamIsCapturing, "cuStreamIsCapturing", 10000);
    functions.load(api.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", 10010);
    functions.load(api.cuEventCreate, "cuEventCreate", 2000);
    functions.load(api.cuEventDestroy, "cuEventDestroy", 4000);
    functions.load(api.cuEventRecord, "cuEventRecord", 2000);
    functions.load(api.cuEventQuery, "cuEventQuery", 2000);
    functions.load(api.cuEventSynchronize, "cuEventSynchronize", 2000);
    functions.load(api.cuMemAlloc, "cuMemAlloc", 3020);
    functions.load(api.cuMemFree, "cuMemFree", 3020);
    functions.load(api.cuMemAllocHost, "cuMemAllocHost", 3020);
    functions.load(api.cuMemFreeHost, "cuMemFreeHost", 2000);
    functions.load(api.cuMemHostRegister, "cuMemHostRegister", 6050);
    functions.load(api.cuMemHostUnregister, "cuMemHostUnregister", 4000);
    functions.load(api.cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer", 3020);
    functions.load(api.cuMemcpyAsync, "cuMemcpyAsync", 4000);
    functions.load(api.cuModuleLoadData, "cuModuleLoadData", 2000);
    functions.load(api.cuModuleUnload, "cuModuleUnload", 2000);
    functions.load(api.cuModuleGetFunction, "cuModuleGetFunction", 2000);
    functions.load(api.cuLaunchKernel, "cuLaunchKernel", 4000);
    functions.load_optional(api.cuMemcpyBatchAsync, "cuMemcpyBatchAsync", 12080);
}

}  // namespace

Result<CudaApi> CudaApi::load(const std::string& library) {
    Result<CudaDriver> driver = CudaDriver::load(library);
    if (!driver.ok()) {
        return driver.fault();
    }
    const Result<DynamicLibrary> opened = DynamicLibrary::open(library);
    if (!opened.ok()) {
        return opened.fault();
    }
    FunctionTable functions(opened.value());
    if (!functions.is_there()) {
        return Status(Code::unavailable, library + " is of a driver before CUDA 11.3");
    }
    CudaApi api;
    api.driver = driver.value();
    load_functions(api, functions);
    if (!functions.missing().empty()) {
        return Status(Code::unavailable, library + " lacks " + functions.missing());
    }
    return api;
}

}  // namespace kvo
