// Stands in for libcuda.so.1: two devices, and a count of what initialised it. test_cuda_driver opens it by path.
#include <cstdint>
#include <cstdio>
#include <cstring>

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kNotInitialized = 3;
constexpr int kNoDevice = 100;
constexpr int kNotFound = 500;

bool is_initialised = false;

}  // namespace

STUB_EXPORT int stub_init_calls;
STUB_EXPORT int stub_init_result;
int stub_init_calls = 0;
int stub_init_result = kSuccess;

STUB_EXPORT int cuInit(unsigned flags) {
    ++stub_init_calls;
    is_initialised = stub_init_result == kSuccess;
    return flags == 0 ? stub_init_result : kInvalidValue;
}

STUB_EXPORT int cuDriverGetVersion(int* version) {
    *version = 13000;
    return kSuccess;
}

STUB_EXPORT int cuGetErrorName(int status, const char** name) {
    switch (status) {
        case kNotInitialized:
            *name = "CUDA_ERROR_NOT_INITIALIZED";
            return kSuccess;
        case kNoDevice:
            *name = "CUDA_ERROR_NO_DEVICE";
            return kSuccess;
        default:
            *name = nullptr;
            return kInvalidValue;
    }
}

#if !defined(STUB_LACKS_DEVICES)

STUB_EXPORT int cuDeviceGetCount(int* count) {
    *count = 2;
    return is_initialised ? kSuccess : kNotInitialized;
}

STUB_EXPORT int cuDeviceGet(int* device, int ordinal) {
    *device = 10 + ordinal;  // an id is not an ordinal
    return is_initialised ? kSuccess : kNotInitialized;
}

#endif

STUB_EXPORT int cuDeviceGetName(char* name, int capacity, int device) {
    if (device != 10 && device != 11) {
        return kInvalidValue;
    }
    std::snprintf(name, static_cast<std::size_t>(capacity), "Stub %c", device == 10 ? 'A' : 'B');
    return kSuccess;
}

STUB_EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (attribute != 75 && attribute != 76) {
        return kInvalidValue;
    }
    *value = attribute == 75 ? (device == 10 ? 9 : 12) : 0;
    return kSuccess;
}

#if defined(STUB_HAS_LOOKUP)

STUB_EXPORT int stub_lookups;
int stub_lookups = 0;

// Knows cuInit only; for the rest the shim has to fall back to the loader.
STUB_EXPORT int cuGetProcAddress_v2(const char* symbol, void** address, int, std::uint64_t, int* reason) {
    ++stub_lookups;
    *reason = 0;
    *address = std::strcmp(symbol, "cuInit") == 0 ? reinterpret_cast<void*>(cuInit) : nullptr;
    return *address != nullptr ? kSuccess : kNotFound;
}

#endif
