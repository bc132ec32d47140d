#include "shim/cuda_driver.hpp"

#include <array>

#include "shim/dynamic_library.hpp"

namespace kvo {
namespace {

// cuGetProcAddress: (symbol, address, the newest CUDA version whose signature is wanted, flags).
using FindSymbol = CudaStatus (*)(const char* symbol, void** address, int version, std::uint64_t flags);
using FindSymbolWithReason = CudaStatus (*)(const char* symbol, void** address, int version, std::uint64_t flags,
                                            int* reason);

constexpr int kComputeMajorAttribute = 75;
constexpr int kComputeMinorAttribute = 76;

// The driver's own look-up chooses among the versions of a function by the interface we were written for; the loader's
// look-up gives whatever bears the plain name. Drivers before 11.3 have the second only.
class SymbolTable {
public:
    explicit SymbolTable(DynamicLibrary library)
        : library_(library),
          find_with_reason_(reinterpret_cast<FindSymbolWithReason>(library.find("cuGetProcAddress_v2"))),
          find_(reinterpret_cast<FindSymbol>(library.find("cuGetProcAddress"))) {}

    // `since`: the CUDA version that brought this signature.
    template <typename Function>
    void load(Function& function, const char* symbol, int since) {
        void* address = nullptr;
        if (find_with_reason_ != nullptr) {
            int reason = 0;
            if (find_with_reason_(symbol, &address, since, 0, &reason) != kCudaSuccess) {
                address = nullptr;
            }
        } else if (find_ != nullptr && find_(symbol, &address, since, 0) != kCudaSuccess) {
            address = nullptr;
        }
        if (address == nullptr) {
            address = library_.find(symbol);
        }
        if (address == nullptr) {
            missing_ += missing_.empty() ? symbol : std::string(", ") + symbol;
        }
        function = reinterpret_cast<Function>(address);
    }

    const std::string& missing() const noexcept { return missing_; }

private:
    DynamicLibrary library_;
    FindSymbolWithReason find_with_reason_;
    FindSymbol find_;
    std::string missing_;
};

}  // namespace

Result<CudaDriver> CudaDriver::load(const std::string& library) {
    Result<DynamicLibrary> opened = DynamicLibrary::open(library);
    if (!opened.ok()) {
        return opened.fault();
    }
    SymbolTable symbols(opened.value());
    CudaDriver driver;
    symbols.load(driver.cuInit, "cuInit", 2000);
    symbols.load(driver.cuDriverGetVersion, "cuDriverGetVersion", 2020);
    symbols.load(driver.cuGetErrorName, "cuGetErrorName", 6000);
    symbols.load(driver.cuDeviceGet, "cuDeviceGet", 2000);
    symbols.load(driver.cuDeviceGetCount, "cuDeviceGetCount", 2000);
    symbols.load(driver.cuDeviceGetName, "cuDeviceGetName", 2000);
    symbols.load(driver.cuDeviceGetAttribute, "cuDeviceGetAttribute", 2000);
    if (!symbols.missing().empty()) {
        return Status(Code::unavailable, library + " lacks " + symbols.missing());
    }
    return driver;
}

Result<int> CudaDriver::version() const {
    int version = 0;
    if (const CudaStatus status = cuDriverGetVersion(&version); status != kCudaSuccess) {
        return Status(Code::failed, "cuDriverGetVersion: " + describe(status));
    }
    return version;
}

Result<std::vector<CudaDevice>> CudaDriver::probe_devices() const {
    const auto fault = [this](const char* what, CudaStatus status) {
        return Status(Code::failed, std::string(what) + ": " + describe(status));
    };
    if (const CudaStatus status = cuInit(0); status != kCudaSuccess) {
        return fault("cuInit", status);
    }
    int count = 0;
    if (const CudaStatus status = cuDeviceGetCount(&count); status != kCudaSuccess) {
        return fault("cuDeviceGetCount", status);
    }
    std::vector<CudaDevice> devices(static_cast<std::size_t>(count));
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        CudaDevice& device = devices[static_cast<std::size_t>(ordinal)];
        CudaDeviceId id = 0;
        if (const CudaStatus status = cuDeviceGet(&id, ordinal); status != kCudaSuccess) {
            return fault("cuDeviceGet", status);
        }
        std::array<char, 256> name{};  // one more than the driver is told, so that it always ends
        if (const auto status = cuDeviceGetName(name.data(), name.size() - 1, id); status != kCudaSuccess) {
            return fault("cuDeviceGetName", status);
        }
        device.name = name.data();
        for (const auto& [value, attribute] : {std::pair{&device.compute_major, kComputeMajorAttribute},
                                               std::pair{&device.compute_minor, kComputeMinorAttribute}}) {
            if (const auto status = cuDeviceGetAttribute(value, attribute, id); status != kCudaSuccess) {
                return fault("cuDeviceGetAttribute", status);
            }
        }
    }
    return devices;
}

std::string CudaDriver::describe(CudaStatus status) const {
    const char* name = nullptr;
    if (cuGetErrorName(status, &name) == kCudaSuccess && name != nullptr) {
        return name;
    }
    return "CUDA error " + std::to_string(status);
}

CudaFindings find_cuda(bool probe_devices, const std::string& library) {
    CudaFindings found;
    const Result<CudaDriver> driver = CudaDriver::load(library);
    if (!driver.ok()) {
        found.problem = driver.fault().message();
        return found;
    }
    const Result<int> version = driver.value().version();
    if (!version.ok()) {
        found.problem = version.fault().message();
        return found;
    }
    found.version = version.value();
    if (probe_devices) {
        const Result<std::vector<CudaDevice>> devices = driver.value().probe_devices();
        if (devices.ok()) {
            found.devices = devices.value();
        } else {
            found.problem = devices.fault().message();
        }
    }
    return found;
}

}  // namespace kvo
