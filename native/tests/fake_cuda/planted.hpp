// Programs with a race, which the checker has to find under every seed, and the same programs put right, of which it
// has to say nothing.
#pragma once

#include <array>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "fake_cuda/fake_program.hpp"

namespace kvo::fake {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr std::uint64_t kPlantedSeeds = 40;
#else
inline constexpr std::uint64_t kPlantedSeeds = 200;
#endif
inline constexpr std::size_t kBlock = 4096;

// A compute stream, a copy stream, a page of the device and a slot of the host.
struct Scene {
    explicit Scene(const Settings& settings) : program(FAKE_CUDA, settings) {
        program.control().keep_reports(true);
        compute = program.open_stream();
        copies = program.open_stream();
        event = program.open_event();
        done = program.open_event();
        page = program.allocate_device(kBlock);
        slot = program.allocate_host(kBlock);
    }
    // Waits for all operations, so that those still on their way are checked too.
    void finish() {
        program.synchronize(compute);
        program.synchronize(copies);
    }
    void write_page() { program.compute(compute, {}, {{page, kBlock}}, 7); }
    void read_page() { program.compute(compute, {{page, kBlock}}, {}); }
    void save() { program.copy(address_of_host(slot), page, kBlock, copies); }
    void load() { program.copy(page, address_of_host(slot), kBlock, copies); }

    // Another thread, until it ends; that it began and ended is no order between the two.
    void run_thread(const std::function<void()>& body) {
        std::exception_ptr fault;
        std::thread([&] {
            try {
                program.control().exempt_thread(true);
                CHECK_EQUAL(program.api().cuCtxSetCurrent(program.context()), kCudaSuccess);
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
    CudaStream compute = nullptr;
    CudaStream copies = nullptr;
    CudaEvent event = nullptr;
    CudaEvent done = nullptr;
    CudaAddress page = 0;
    std::uint8_t* slot = nullptr;
};

// The copy kernel, with a list of one run in pinned memory.
class CopyKernel {
public:
    static constexpr std::size_t kListBytes = 3 * sizeof(std::uint64_t);

    explicit CopyKernel(Program& program)
        : program_(program), list_(reinterpret_cast<std::uint64_t*>(program.allocate_host(kListBytes))) {
        CudaModule module = nullptr;
        CHECK_EQUAL(program.api().cuModuleLoadData(&module, "image"), kCudaSuccess);
        CHECK_EQUAL(program.api().cuModuleGetFunction(&function_, module, "kvo_copy_runs"), kCudaSuccess);
    }
    std::uint64_t* list() { return list_; }
    CudaAddress mapped(void* host) {
        CudaAddress address = 0;
        CHECK_EQUAL(program_.api().cuMemHostGetDevicePointer(&address, host, 0), kCudaSuccess);
        return address;
    }
    void write_list(CudaAddress source, CudaAddress destination, std::uint64_t length) {
        program_.control().host_writes(list_, kListBytes);
        list_[0] = source;
        list_[1] = destination;
        list_[2] = length;
    }
    // Launches the kernel with a list at this address of the device.
    void launch(CudaAddress list, CudaStream stream) {
        std::array<std::uint64_t, 4> runs = {list, list + 8, list + 16, 1};
        std::uint32_t team_size = 32;
        std::array<void*, 2> parameters = {runs.data(), &team_size};
        CHECK_EQUAL(program_.api().cuLaunchKernel(function_, 2, 1, 1, 64, 1, 1, 0, stream, parameters.data(), nullptr),
                    kCudaSuccess);
    }

private:
    Program& program_;
    std::uint64_t* list_;
    CudaFunction function_ = nullptr;
};

struct Planted {
    const char* name;
    void (*program)(Scene& scene, bool is_right);
    const char* reported;  // part of the report
};

inline std::vector<std::string> reports_of(const Planted& planted, const Settings& settings, bool is_right) {
    Scene scene(settings);
    planted.program(scene, is_right);
    scene.finish();
    scene.program.control().keep_own_clock(false);
    std::vector<std::string> reports = scene.program.control().take_reports();
    scene.program.control().keep_reports(false);
    return reports;
}

inline void check_found(std::span<const Planted> all, Settings settings) {
    for (const Planted& planted : all) {
        for (settings.seed = 1; settings.seed <= kPlantedSeeds; ++settings.seed) {
            const auto reports = reports_of(planted, settings, false);
            if (reports.empty() || reports.front().find(planted.reported) == std::string::npos) {
                test::fail(__FILE__, __LINE__,
                           std::string(planted.name) + ", seed " + std::to_string(settings.seed) + ": " +
                               (reports.empty() ? "nothing reported" : reports.front()));
            }
        }
    }
}

inline void check_not_reported(std::span<const Planted> all, Settings settings) {
    for (const Planted& planted : all) {
        for (settings.seed = 1; settings.seed <= kPlantedSeeds; ++settings.seed) {
            const auto reports = reports_of(planted, settings, true);
            if (!reports.empty()) {
                test::fail(
                    __FILE__, __LINE__,
                    std::string(planted.name) + ", seed " + std::to_string(settings.seed) + ": " + reports.front());
            }
        }
    }
}

}  // namespace kvo::fake
