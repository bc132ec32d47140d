#include "shim/cuda_driver.hpp"

#include "check.hpp"
#include "shim/dynamic_library.hpp"

using namespace kvo;

namespace {

int& stub_number(const char* library, const char* symbol) {
    const auto opened = DynamicLibrary::open(library);
    CHECK(opened.ok());
    auto* const number = static_cast<int*>(opened.value().find(symbol));
    CHECK(number != nullptr);
    return *number;
}

}  // namespace

TEST(says_when_there_is_no_driver) {
    const auto driver = CudaDriver::load("libkvoffload_no_such_driver.so.1");
    CHECK(!driver.ok());
    CHECK(driver.fault().code() == Code::unavailable);
    CHECK(driver.fault().message().find("libkvoffload_no_such_driver.so.1") != std::string::npos);
}

TEST(names_the_functions_a_driver_lacks) {
    const auto driver = CudaDriver::load(DRIVER_STUB_INCOMPLETE);
    CHECK(!driver.ok());
    CHECK(driver.fault().code() == Code::unavailable);
    CHECK(driver.fault().message().ends_with("lacks cuDeviceGet, cuDeviceGetCount"));
}

// vLLM forks its workers; a parent that has called cuInit spoils CUDA for them.
TEST(the_version_is_read_without_initialising_the_driver) {
    for (const char* library : {DRIVER_STUB_CURRENT, DRIVER_STUB_OLDER}) {
        const auto driver = CudaDriver::load(library);
        CHECK(driver.ok());
        CHECK_EQUAL(driver.value().version().value(), 13000);
        CHECK_EQUAL(stub_number(library, "stub_init_calls"), 0);
    }
}

TEST(the_drivers_own_lookup_is_asked_first) {
    int& lookups = stub_number(DRIVER_STUB_CURRENT, "stub_lookups");
    lookups = 0;
    CHECK(CudaDriver::load(DRIVER_STUB_CURRENT).ok());
    CHECK_EQUAL(lookups, 7);
}

TEST(devices_are_probed_when_asked) {
    for (const char* library : {DRIVER_STUB_CURRENT, DRIVER_STUB_OLDER}) {
        stub_number(library, "stub_init_calls") = 0;
        const auto devices = CudaDriver::load(library).value().probe_devices();
        CHECK(devices.ok());
        CHECK_EQUAL(stub_number(library, "stub_init_calls"), 1);
        CHECK_EQUAL(devices.value().size(), 2u);
        CHECK_EQUAL(devices.value()[0].name, "Stub A");
        CHECK_EQUAL(devices.value()[0].compute_major, 9);
        CHECK_EQUAL(devices.value()[1].name, "Stub B");
        CHECK_EQUAL(devices.value()[1].compute_major, 12);
        CHECK_EQUAL(devices.value()[1].compute_minor, 0);
    }
}

TEST(a_fault_bears_the_drivers_name_for_it) {
    int& result = stub_number(DRIVER_STUB_OLDER, "stub_init_result");
    result = 100;
    const CudaDriver driver = CudaDriver::load(DRIVER_STUB_OLDER).value();
    CHECK_EQUAL(driver.probe_devices().fault().message(), "cuInit: CUDA_ERROR_NO_DEVICE");
    result = 9999;
    CHECK_EQUAL(driver.probe_devices().fault().message(), "cuInit: CUDA error 9999");
    result = 0;
}

TEST(findings_initialise_the_driver_only_for_devices) {
    int& init_calls = stub_number(DRIVER_STUB_CURRENT, "stub_init_calls");
    init_calls = 0;
    const CudaFindings bare = find_cuda(false, DRIVER_STUB_CURRENT);
    CHECK_EQUAL(bare.version.value(), 13000);
    CHECK(!bare.devices.has_value() && bare.problem.empty());
    CHECK_EQUAL(init_calls, 0);

    const CudaFindings probed = find_cuda(true, DRIVER_STUB_CURRENT);
    CHECK_EQUAL(probed.devices.value().size(), 2u);
    CHECK_EQUAL(init_calls, 1);
}

TEST(findings_keep_what_was_found_before_the_fault) {
    int& result = stub_number(DRIVER_STUB_OLDER, "stub_init_result");
    result = 100;
    const CudaFindings found = find_cuda(true, DRIVER_STUB_OLDER);
    result = 0;
    CHECK_EQUAL(found.version.value(), 13000);
    CHECK(!found.devices.has_value());
    CHECK_EQUAL(found.problem, "cuInit: CUDA_ERROR_NO_DEVICE");
    CHECK(!find_cuda(true, DRIVER_STUB_INCOMPLETE).version.has_value());
}
