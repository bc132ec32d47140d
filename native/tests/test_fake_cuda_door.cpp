// The plain C door, opened by path as a test in Python does it.
#include <array>
#include <string>

#include "check.hpp"
#include "fake_cuda/fake_program.hpp"
#include "shim/dynamic_library.hpp"

using namespace kvo;

namespace {

template <typename Function>
Function* find(const char* name) {
    static const DynamicLibrary library = DynamicLibrary::open(FAKE_CUDA).value();
    auto* const function = reinterpret_cast<Function*>(library.find(name));
    if (function == nullptr) {
        test::fail(__FILE__, __LINE__, std::string("the library has no ") + name);
    }
    return function;
}

struct Door {
    void (*reset)(std::uint64_t) = find<void(std::uint64_t)>("fake_cuda_reset");
    std::uint64_t (*alloc)(std::uint64_t) = find<std::uint64_t(std::uint64_t)>("fake_cuda_alloc");
    std::uint64_t (*open_stream)() = find<std::uint64_t()>("fake_cuda_open_stream");
    void (*peek)(std::uint64_t, std::uint8_t*,
                 std::size_t) = find<void(std::uint64_t, std::uint8_t*, std::size_t)>("fake_cuda_peek");
    void (*poke)(std::uint64_t, const std::uint8_t*,
                 std::size_t) = find<void(std::uint64_t, const std::uint8_t*, std::size_t)>("fake_cuda_poke");
    void (*write_pages)(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t) =
        find<void(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t)>("fake_cuda_write_pages");
    std::uint8_t (*pattern_byte)(std::uint64_t, std::uint64_t) =
        find<std::uint8_t(std::uint64_t, std::uint64_t)>("fake_cuda_pattern_byte");
    std::uint64_t (*report_count)() = find<std::uint64_t()>("fake_cuda_report_count");
    const char* (*report)(std::uint64_t) = find<const char*(std::uint64_t)>("fake_cuda_report");
};

}  // namespace

TEST(bytes_poked_are_bytes_peeked) {
    const Door door;
    door.reset(3);
    const std::uint64_t page = door.alloc(64);
    CHECK(page != 0);
    const std::array<std::uint8_t, 3> written = {1, 2, 3};
    std::array<std::uint8_t, 3> seen{};
    door.poke(page + 61, written.data(), 3);
    door.peek(page + 61, seen.data(), 3);
    CHECK(seen == written);
    CHECK_EQUAL(door.alloc(0), 0u);
    CHECK_EQUAL(door.alloc(std::uint64_t{1} << 40), 0u);
    CHECK_EQUAL(door.report_count(), 0u);
}

TEST(a_stream_of_the_door_is_one_of_the_driver) {
    const Door door;
    door.reset(4);
    const std::uint64_t page = door.alloc(4096);
    const std::uint64_t stream = door.open_stream();
    door.write_pages(stream, page, 4096, 9);
    const CudaApi api = CudaApi::load(FAKE_CUDA).value();
    CudaContext context = nullptr;
    CHECK_EQUAL(api.cuDevicePrimaryCtxRetain(&context, 10), kCudaSuccess);
    CHECK_EQUAL(api.cuCtxSetCurrent(context), kCudaSuccess);
    CHECK_EQUAL(api.cuStreamSynchronize(reinterpret_cast<CudaStream>(stream)), kCudaSuccess);
    std::array<std::uint8_t, 4096> seen{};
    door.peek(page, seen.data(), seen.size());
    for (std::size_t i = 0; i < seen.size(); ++i) {
        CHECK_EQUAL(seen[i], door.pattern_byte(9, i));
    }
    CHECK_EQUAL(door.report_count(), 0u);
}

TEST(what_is_wrong_is_counted_and_told) {
    const Door door;
    door.reset(5);
    const std::uint64_t page = door.alloc(64);
    std::array<std::uint8_t, 65> seen{};
    door.peek(page, seen.data(), seen.size());
    door.write_pages(0x1234, page, 64, 1);
    CHECK_EQUAL(door.report_count(), 2u);
    CHECK_EQUAL(std::string(door.report(0)), "the test looks at device memory 1 + 0x0..0x41, which ends at 0x40");
    CHECK_EQUAL(std::string(door.report(1)), "launch_compute on what is no stream");
    CHECK_EQUAL(std::string(door.report(2)), "");
    door.reset(5);
    CHECK_EQUAL(door.report_count(), 0u);
    fake::open_control(FAKE_CUDA)->keep_reports(false);
}
