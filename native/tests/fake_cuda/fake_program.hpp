// A small program on the driver made for tests: one device, and what it opens is forgotten with the driver's next life.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "fake_cuda/fake_control.hpp"
#include "shim/cuda_api.hpp"

namespace kvo::fake {

class Program {
public:
    Program(const std::string& library, const Settings& settings)
        : control_(*open_control(library)), patience_ms_(settings.patience_ms) {
        control_.reset(settings);
        Result<CudaApi> loaded = CudaApi::load(library);
        CHECK(loaded.ok());
        api_ = loaded.value();
        control_.exempt_thread(true);
        CudaDeviceId device = 0;
        CHECK_EQUAL(api_.driver.cuInit(0), kCudaSuccess);
        CHECK_EQUAL(api_.driver.cuDeviceGet(&device, 0), kCudaSuccess);
        CHECK_EQUAL(api_.cuDevicePrimaryCtxRetain(&context_, device), kCudaSuccess);
        CHECK_EQUAL(api_.cuCtxSetCurrent(context_), kCudaSuccess);
    }

    Control& control() { return control_; }
    const CudaApi& api() const { return api_; }
    CudaContext context() const { return context_; }

    CudaStream open_stream() {
        CudaStream stream = nullptr;
        CHECK_EQUAL(api_.cuStreamCreateWithPriority(&stream, kCudaStreamNonBlocking, 0), kCudaSuccess);
        return stream;
    }
    CudaEvent open_event() {
        CudaEvent event = nullptr;
        CHECK_EQUAL(api_.cuEventCreate(&event, kCudaEventDisableTiming | kCudaEventBlockingSync), kCudaSuccess);
        return event;
    }
    CudaAddress allocate_device(std::size_t bytes) {
        CudaAddress address = 0;
        CHECK_EQUAL(api_.cuMemAlloc(&address, bytes), kCudaSuccess);
        return address;
    }
    std::uint8_t* allocate_host(std::size_t bytes) {
        void* address = nullptr;
        CHECK_EQUAL(api_.cuMemAllocHost(&address, bytes), kCudaSuccess);
        return static_cast<std::uint8_t*>(address);
    }

    void compute(CudaStream stream, std::vector<Bytes> reads, std::vector<Bytes> writes, std::uint64_t pattern = 0) {
        control_.launch_compute(stream, reads, writes, pattern);
    }
    void copy(CudaAddress destination, CudaAddress source, std::size_t bytes, CudaStream stream) {
        CHECK_EQUAL(api_.cuMemcpyAsync(destination, source, bytes, stream), kCudaSuccess);
    }
    void record(CudaEvent event, CudaStream stream) { CHECK_EQUAL(api_.cuEventRecord(event, stream), kCudaSuccess); }
    void wait(CudaStream stream, CudaEvent event) {
        CHECK_EQUAL(api_.cuStreamWaitEvent(stream, event, 0), kCudaSuccess);
    }
    void synchronize(CudaStream stream) { CHECK_EQUAL(api_.cuStreamSynchronize(stream), kCudaSuccess); }
    // Returns the driver's status of the event, once that is no longer "not ready".
    CudaStatus ask(CudaEvent event) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms_);
        CudaStatus status = kCudaNotReady;
        while (status == kCudaNotReady && std::chrono::steady_clock::now() < end) {
            status = api_.cuEventQuery(event);
        }
        return status;
    }
    void poll(CudaEvent event) { CHECK_EQUAL(ask(event), kCudaSuccess); }

private:
    Control& control_;
    const int patience_ms_;
    CudaApi api_;
    CudaContext context_ = nullptr;
};

inline CudaAddress address_of_host(const void* host) { return reinterpret_cast<CudaAddress>(host); }

}  // namespace kvo::fake
