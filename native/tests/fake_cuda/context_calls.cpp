// Devices, contexts and modules; what the loader finds by name; and the look-up of everything else.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

#include "fake_cuda/call.hpp"
#include "fake_cuda/entry_points.hpp"

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvo::fake {
namespace {

constexpr int kInvalidDevice = 101;
constexpr int kFirstDeviceId = 10;  // an id is not an ordinal
constexpr int kNormalPriority = 0;
constexpr int kHighestPriority = -5;
constexpr std::array kKernels = {"kvo_copy_runs", "kvo_fetch"};

void* context_of(int ordinal) {
    return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + static_cast<std::uintptr_t>(ordinal) * 256);
}
void* const kModule = reinterpret_cast<void*>(std::uintptr_t{1} << 41);
void* function_of(std::size_t kernel) { return reinterpret_cast<void*>((std::uintptr_t{1} << 42) + kernel); }

bool is_device(const Driver& driver, int device) {
    return device >= kFirstDeviceId && device < kFirstDeviceId + driver.settings().devices;
}

int primary_context_retain(void** context, int device) {
    Call call("cuDevicePrimaryCtxRetain", Needs::nothing);
    if (call.fails()) {
        return call.status();
    }
    if (!is_device(call.driver, device)) {
        return kInvalidDevice;
    }
    ++call.driver.retained()[static_cast<std::size_t>(device - kFirstDeviceId)];
    *context = context_of(device - kFirstDeviceId);
    return 0;
}

int primary_context_release(int device) {
    Call call("cuDevicePrimaryCtxRelease", Needs::nothing);
    if (!is_device(call.driver, device)) {
        return kInvalidDevice;
    }
    int& retained = call.driver.retained()[static_cast<std::size_t>(device - kFirstDeviceId)];
    if (retained == 0) {
        return call.refuse("cuDevicePrimaryCtxRelease of a context that is not retained", kInvalidContext);
    }
    --retained;
    return call.status();
}

// The device of a context that is retained, or -1.
int find_context(const Driver& driver, const void* context) {
    for (int ordinal = 0; ordinal < driver.settings().devices; ++ordinal) {
        if (context == context_of(ordinal) && driver.retained()[static_cast<std::size_t>(ordinal)] > 0) {
            return ordinal;
        }
    }
    return -1;
}

int context_push(void* context) {
    Call call("cuCtxPushCurrent", Needs::nothing);
    if (call.fails()) {
        return call.status();
    }
    const int ordinal = find_context(call.driver, context);
    if (ordinal < 0) {
        return kInvalidContext;
    }
    call.driver.host().contexts.push_back(ordinal);
    return 0;
}

int context_pop(void** context) {
    Call call("cuCtxPopCurrent", Needs::nothing);
    std::vector<int>& contexts = call.driver.host().contexts;
    if (contexts.empty()) {
        return kInvalidContext;
    }
    *context = context_of(contexts.back());
    contexts.pop_back();
    return call.status();
}

// Instead of the one that is current, if one is.
int context_set_current(void* context) {
    Call call("cuCtxSetCurrent", Needs::nothing);
    if (call.fails()) {
        return call.status();
    }
    const int ordinal = find_context(call.driver, context);
    if (context != nullptr && ordinal < 0) {
        return kInvalidContext;
    }
    std::vector<int>& contexts = call.driver.host().contexts;
    if (!contexts.empty()) {
        contexts.pop_back();
    }
    if (context != nullptr) {
        contexts.push_back(ordinal);
    }
    return 0;
}

int context_stream_priorities(int* least, int* greatest) {
    Call call("cuCtxGetStreamPriorityRange");
    *least = kNormalPriority;
    *greatest = kHighestPriority;
    return call.status();
}

int module_load_data(void** module, const void* image) {
    Call call("cuModuleLoadData");
    if (call.fails()) {
        return call.status();
    }
    if (image == nullptr) {
        return kInvalidValue;
    }
    ++call.driver.modules();
    *module = kModule;
    return 0;
}

int module_unload(void* module) {
    Call call("cuModuleUnload");
    if (call.is_refused()) {
        return call.status();
    }
    if (module != kModule || call.driver.modules() == 0) {
        return call.refuse("cuModuleUnload of what is no module", kInvalidHandle);
    }
    --call.driver.modules();
    return call.status();
}

int module_function(void** function, void* module, const char* name) {
    Call call("cuModuleGetFunction");
    if (call.fails()) {
        return call.status();
    }
    const auto kernel = std::ranges::find(kKernels, std::string_view(name));
    if (module != kModule || kernel == kKernels.end()) {
        return kNotFound;
    }
    *function = function_of(static_cast<std::size_t>(kernel - kKernels.begin()));
    return 0;
}

int launch_kernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra) {
    Call call("cuLaunchKernel");
    if (call.fails()) {
        return call.status();
    }
    Stream* const queue = call.driver.stream(stream);
    if (queue == nullptr) {
        return call.refuse("cuLaunchKernel on what is no stream", kInvalidHandle);
    }
    const unsigned blocks = grid_x * grid_y * grid_z;
    const unsigned threads = block_x * block_y * block_z;
    const bool is_fetch = function == function_of(1);
    if ((function != function_of(0) && !is_fetch) || blocks == 0 || threads == 0 || threads > 1024 ||
        shared_bytes != 0 || parameters == nullptr || extra != nullptr) {
        return kInvalidValue;
    }
    if (is_fetch) {
        Move move;
        std::memcpy(&move.source, parameters[0], sizeof move.source);
        std::memcpy(&move.destination, parameters[1], sizeof move.destination);
        std::memcpy(&move.length, parameters[2], sizeof move.length);
        return call.driver.submit(*queue, "kvo_fetch", Transfer{{move}}, call.later());
    }
    RunKernel kernel;
    std::memcpy(&kernel.runs, parameters[0], sizeof kernel.runs);
    std::memcpy(&kernel.team_size, parameters[1], sizeof kernel.team_size);
    kernel.threads = std::uint64_t{blocks} * threads;
    if (kernel.team_size == 0 || block_x % kernel.team_size != 0) {
        return call.refuse("kvo_copy_runs with a team that does not divide its block", kInvalidValue);
    }
    return call.driver.submit(*queue, "kvo_copy_runs", kernel, call.later());
}

constexpr std::array kErrorNames = {
    std::pair{0, "CUDA_SUCCESS"},
    std::pair{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    std::pair{kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    std::pair{kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
    std::pair{kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    std::pair{kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
    std::pair{kNotFound, "CUDA_ERROR_NOT_FOUND"},
    std::pair{kNotReady, "CUDA_ERROR_NOT_READY"},
    std::pair{kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    std::pair{kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    std::pair{kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    std::pair{kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
    std::pair{kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
    std::pair{kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    std::pair{kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    std::pair{kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
    std::pair{kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT"},
};

}  // namespace

std::span<const EntryPoint> context_entry_points() {
    static const std::array points = {
        EntryPoint{"cuDevicePrimaryCtxRetain", 7000, address_of(primary_context_retain)},
        EntryPoint{"cuDevicePrimaryCtxRelease", 11000, address_of(primary_context_release)},
        EntryPoint{"cuCtxSetCurrent", 4000, address_of(context_set_current)},
        EntryPoint{"cuCtxPushCurrent", 4000, address_of(context_push)},
        EntryPoint{"cuCtxPopCurrent", 4000, address_of(context_pop)},
        EntryPoint{"cuCtxGetStreamPriorityRange", 5050, address_of(context_stream_priorities)},
        EntryPoint{"cuModuleLoadData", 2000, address_of(module_load_data)},
        EntryPoint{"cuModuleUnload", 2000, address_of(module_unload)},
        EntryPoint{"cuModuleGetFunction", 2000, address_of(module_function)},
        EntryPoint{"cuLaunchKernel", 4000, address_of(launch_kernel)},
    };
    return points;
}

}  // namespace kvo::fake

using kvo::fake::Call;
using kvo::fake::Needs;

// Found by the loader, as in the real library. The rest has to be looked up by version: the plain names there are those
// of signatures long replaced.

FAKE_EXPORT int cuInit(unsigned flags) {
    Call call("cuInit", Needs::nothing);
    return call.fails() ? call.status() : flags == 0 ? 0 : kvo::fake::kInvalidValue;
}

FAKE_EXPORT int cuDriverGetVersion(int* version) {
    *version = kvo::fake::Driver::instance().settings().version;
    return 0;
}

FAKE_EXPORT int cuGetErrorName(int status, const char** name) {
    const auto* const at = std::ranges::find(kvo::fake::kErrorNames, status, &std::pair<int, const char*>::first);
    *name = at == kvo::fake::kErrorNames.end() ? nullptr : at->second;
    return *name == nullptr ? kvo::fake::kInvalidValue : 0;
}

FAKE_EXPORT int cuDeviceGetCount(int* count) {
    Call call("cuDeviceGetCount", Needs::nothing);
    *count = call.driver.settings().devices;
    return call.status();
}

FAKE_EXPORT int cuDeviceGet(int* device, int ordinal) {
    Call call("cuDeviceGet", Needs::nothing);
    *device = kvo::fake::kFirstDeviceId + ordinal;
    return call.fails()                                               ? call.status()
           : ordinal >= 0 && ordinal < call.driver.settings().devices ? 0
                                                                      : kvo::fake::kInvalidDevice;
}

FAKE_EXPORT int cuDeviceGetName(char* name, int capacity, int device) {
    Call call("cuDeviceGetName", Needs::nothing);
    std::snprintf(name, static_cast<std::size_t>(capacity), "Made-up device %d", device - kvo::fake::kFirstDeviceId);
    return call.status();
}

FAKE_EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
    constexpr std::array kAttributes = {
        std::pair{16, 132},  // multiprocessors
        std::pair{19, 1},    // maps host memory
        std::pair{75, 9},    // compute capability, major
        std::pair{76, 0},    // minor
    };
    Call call("cuDeviceGetAttribute", Needs::nothing);
    if (call.fails()) {
        return call.status();
    }
    const auto* const at = std::ranges::find(kAttributes, attribute, &std::pair<int, int>::first);
    if (at == kAttributes.end() || !kvo::fake::is_device(call.driver, device)) {
        return kvo::fake::kInvalidValue;
    }
    *value = at->second;
    return 0;
}

// Gives the newest signature that is not newer than asked for.
FAKE_EXPORT int cuGetProcAddress_v2(const char* symbol, void** address, int version, std::uint64_t, int* reason) {
    const kvo::fake::Settings& settings = kvo::fake::Driver::instance().settings();
    *address = nullptr;
    *reason = 1;  // no such function
    if (std::ranges::find(settings.missing, symbol) != settings.missing.end()) {
        return kvo::fake::kNotFound;
    }
    int newest = 0;
    for (const auto points :
         {kvo::fake::context_entry_points(), kvo::fake::memory_entry_points(), kvo::fake::stream_entry_points()}) {
        for (const auto& point : points) {
            if (std::strcmp(point.name, symbol) == 0 && point.since <= settings.version) {
                *reason = *reason == 1 ? 2 : *reason;  // known, but not in so old a version
                if (point.since <= version && point.since > newest) {
                    newest = point.since;
                    *address = point.address;
                    *reason = 0;
                }
            }
        }
    }
    return *address == nullptr ? kvo::fake::kNotFound : 0;
}
