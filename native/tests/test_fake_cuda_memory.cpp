// The rules for registered memory, and that no operation crosses from one allocation or registration into another.
#include <array>
#include <memory>

#include "check.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;
using fake::address_of_host;
using fake::Program;

namespace {

constexpr std::size_t kPage = 4096;

struct alignas(kPage) Pages {
    std::array<std::uint8_t, 4 * kPage> bytes{};
    std::uint8_t* at(std::size_t offset) { return bytes.data() + offset; }
};

CudaStatus register_bytes(Program& program, void* address, std::size_t bytes) {
    return program.api().cuMemHostRegister(address, bytes, kCudaHostRegisterPortable | kCudaHostRegisterMapped);
}

// One copy by each call that copies.
std::array<CudaStatus, 2> copy_both_ways(Program& program, CudaStream stream, CudaAddress destination,
                                         CudaAddress source, std::size_t bytes) {
    CudaCopyAttributes attributes;
    std::size_t start = 0;
    std::size_t failed = 7;
    const CudaStatus batch =
        program.api().cuMemcpyBatchAsync(&destination, &source, &bytes, 1, &attributes, &start, 1, &failed, stream);
    CHECK_EQUAL(failed, batch == kCudaSuccess ? SIZE_MAX : 0u);
    return {program.api().cuMemcpyAsync(destination, source, bytes, stream), batch};
}

}  // namespace

TEST(device_memory_has_a_size) {
    Program program(FAKE_CUDA, {.device_bytes = 1000, .missing = {}});
    CudaAddress address = 0;
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 1001), kCudaOutOfMemory);
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 600), kCudaSuccess);
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 401), kCudaOutOfMemory);
}

TEST(a_page_is_registered_once) {
    Program program(FAKE_CUDA, {});
    const auto memory = std::make_unique<Pages>();
    // The last byte of one page and the first of the next: both pages are locked.
    CHECK_EQUAL(register_bytes(program, memory->at(2 * kPage - 1), 2), kCudaSuccess);
    CHECK_EQUAL(register_bytes(program, memory->at(kPage), 8), fake::kAlreadyRegistered);
    CHECK_EQUAL(register_bytes(program, memory->at(3 * kPage - 1), 1), fake::kAlreadyRegistered);
    CHECK_EQUAL(register_bytes(program, memory->at(0), kPage + 1), fake::kAlreadyRegistered);
    CHECK_EQUAL(register_bytes(program, memory->at(0), 4 * kPage), fake::kAlreadyRegistered);
    CHECK_EQUAL(register_bytes(program, memory->at(0), kPage), kCudaSuccess);
    CHECK_EQUAL(register_bytes(program, memory->at(3 * kPage), kPage), kCudaSuccess);
    CHECK_EQUAL(program.control().live().registrations, 3u);
    // Given back by the address that was registered, not by its page.
    CHECK_EQUAL(program.api().cuMemHostUnregister(memory->at(2 * kPage - 1)), kCudaSuccess);
    CHECK_EQUAL(register_bytes(program, memory->at(kPage), 2 * kPage), kCudaSuccess);
}

TEST(pinned_memory_is_not_registered_again) {
    Program program(FAKE_CUDA, {});
    CHECK_EQUAL(register_bytes(program, program.allocate_host(100) + 200, 8), fake::kAlreadyRegistered);
}

TEST(what_is_no_memory_is_not_registered) {
    Program program(FAKE_CUDA, {});
    const auto memory = std::make_unique<Pages>();
    const auto begin = reinterpret_cast<std::uint64_t>(memory->at(0));
    CHECK_EQUAL(register_bytes(program, memory->at(0), 0), kCudaInvalidValue);
    CHECK_EQUAL(register_bytes(program, memory->at(0), UINT64_MAX), kCudaInvalidValue);
    CHECK_EQUAL(register_bytes(program, memory->at(0), UINT64_MAX - begin), kCudaInvalidValue);
    CHECK_EQUAL(register_bytes(program, memory->at(0), std::size_t{1} << 46), kCudaInvalidValue);
    CHECK_EQUAL(register_bytes(program, memory->at(0), 0 - begin), kCudaInvalidValue);
    CHECK_EQUAL(register_bytes(program, memory->at(0), 0 - begin + kPage), kCudaInvalidValue);
    CHECK_EQUAL(register_bytes(program, nullptr, kPage), kCudaInvalidValue);
    CHECK_EQUAL(program.control().live().registrations, 0u);
}

// Even where the second one begins at the very next byte.
TEST(no_copy_crosses_from_one_registration_into_the_next) {
    Program program(FAKE_CUDA, {});
    const auto memory = std::make_unique<Pages>();
    const CudaStream stream = program.open_stream();
    const CudaAddress device = program.allocate_device(2 * kPage);
    CHECK_EQUAL(register_bytes(program, memory->at(0), kPage), kCudaSuccess);
    CHECK_EQUAL(register_bytes(program, memory->at(kPage), kPage), kCudaSuccess);
    const CudaAddress border = address_of_host(memory->at(kPage));
    for (const CudaStatus status : copy_both_ways(program, stream, border - 8, device, 9)) {
        CHECK_EQUAL(status, kCudaInvalidValue);
    }
    for (const CudaStatus status : copy_both_ways(program, stream, device, border - 1, kPage)) {
        CHECK_EQUAL(status, kCudaInvalidValue);
    }
    for (const CudaStatus status : copy_both_ways(program, stream, border - 8, device, 8)) {
        CHECK_EQUAL(status, kCudaSuccess);
    }
    program.synchronize(stream);
}

TEST(no_copy_crosses_from_one_allocation_into_the_next) {
    fake::Settings settings;
    settings.packs_allocations = true;
    Program program(FAKE_CUDA, settings);
    const CudaStream stream = program.open_stream();
    std::uint8_t* const host = program.allocate_host(2048);
    const CudaAddress first = program.allocate_device(512);
    const CudaAddress second = program.allocate_device(500);
    const CudaAddress third = program.allocate_device(512);
    CHECK_EQUAL(second, first + 512);
    CHECK_EQUAL(third, first + 1024);  // behind a gap
    for (const CudaStatus status : copy_both_ways(program, stream, address_of_host(host), second - 4, 8)) {
        CHECK_EQUAL(status, kCudaInvalidValue);
    }
    for (const CudaStatus status : copy_both_ways(program, stream, first, address_of_host(host), 1024)) {
        CHECK_EQUAL(status, kCudaInvalidValue);
    }
    for (const CudaStatus status : copy_both_ways(program, stream, first, address_of_host(host), 512)) {
        CHECK_EQUAL(status, kCudaSuccess);
    }
    program.synchronize(stream);
    // Freed memory does not count as a neighbour; the copy is found when it runs.
    CHECK_EQUAL(program.api().cuMemFree(second), kCudaSuccess);
    program.control().keep_reports(true);
    program.copy(address_of_host(host), first, 520, stream);
    program.synchronize(stream);
    const auto reports = program.control().take_reports();
    CHECK_EQUAL(reports.size(), 1u);
    CHECK(reports.front().ends_with("which ends at 0x200"));
    program.control().keep_reports(false);
}

TEST(allocations_do_not_touch_unless_asked_to) {
    Program program(FAKE_CUDA, {});
    std::vector<CudaAddress> addresses;
    for (int i = 0; i < 20; ++i) {
        addresses.push_back(program.allocate_device(kPage));
    }
    for (const CudaAddress address : addresses) {
        for (const CudaAddress other : addresses) {
            CHECK(other != address + kPage);
        }
    }
}

// A kernel goes where its lists say, so this is found when it runs.
TEST(no_kernel_run_crosses_from_one_allocation_into_the_next) {
    fake::Settings settings;
    settings.packs_allocations = true;
    Program program(FAKE_CUDA, settings);
    program.control().keep_reports(true);
    const CudaStream stream = program.open_stream();
    const CudaAddress first = program.allocate_device(512);
    CHECK_EQUAL(program.allocate_device(512), first + 512);
    program.compute(stream, {{first + 256, 512}}, {});
    program.synchronize(stream);
    const auto reports = program.control().take_reports();
    CHECK_EQUAL(reports.size(), 1u);
    CHECK(reports.front().ends_with("device memory 1 + 0x100..0x300, which ends at 0x200"));
    program.control().keep_reports(false);
}
