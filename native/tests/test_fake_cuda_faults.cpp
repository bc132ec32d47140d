// Faults strike what they are told to, and leave behind what a real driver would.
#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "check.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;
using fake::address_of_host;
using fake::Fault;
using fake::FaultKind;
using fake::Program;

namespace {

constexpr std::size_t kBytes = 8192;

bool holds_pattern(Program& program, CudaAddress address, std::uint64_t pattern) {
    std::vector<std::uint8_t> seen(kBytes);
    program.control().peek(address, seen);
    for (std::size_t i = 0; i < kBytes; ++i) {
        if (seen[i] != fake::pattern_byte(pattern, i)) {
            return false;
        }
    }
    return true;
}

// A copy of many moves from a written page of the device to a slot.
struct Copy {
    explicit Copy(Program& owner) : program(owner) {
        page = program.allocate_device(kBytes);
        slot = program.allocate_host(kBytes);
        stream = program.open_stream();
        done = program.open_event();
        program.compute(stream, {}, {{page, kBytes}}, 5);
        program.synchronize(stream);
        std::ranges::fill(std::span(slot, kBytes), std::uint8_t{0});
    }
    CudaStatus start() const {
        constexpr std::size_t kMove = 64;
        std::vector<CudaAddress> destinations;
        std::vector<CudaAddress> sources;
        std::vector<std::size_t> sizes(kBytes / kMove, kMove);
        for (std::size_t at = 0; at < kBytes; at += kMove) {
            destinations.push_back(address_of_host(slot) + at);
            sources.push_back(page + at);
        }
        CudaCopyAttributes attributes;
        std::size_t first = 0;
        std::size_t failed = 0;
        return program.api().cuMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), sizes.size(),
                                                &attributes, &first, 1, &failed, stream);
    }
    std::size_t bytes_there() const {
        std::size_t there = 0;
        for (std::size_t i = 0; i < kBytes; ++i) {
            there += slot[i] == fake::pattern_byte(5, i) ? 1 : 0;
        }
        return there;
    }

    Program& program;
    CudaAddress page = 0;
    std::uint8_t* slot = nullptr;
    CudaStream stream = nullptr;
    CudaEvent done = nullptr;
};

}  // namespace

TEST(a_chosen_call_fails_and_the_next_does_not) {
    Program program(FAKE_CUDA, {});
    fake::Control& control = program.control();
    control.exempt_thread(false);
    control.arm_fault({.call = 2, .status = fake::kOutOfMemory});
    CudaAddress address = 0;
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 64), kCudaSuccess);
    CHECK_EQUAL(program.api().cuMemFree(address), fake::kOutOfMemory);  // and is freed
    CHECK_EQUAL(control.live().device_allocations, 0u);
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 64), kCudaSuccess);
    CHECK_EQUAL(control.counted_calls(), 3u);
    CHECK_EQUAL(control.calls_of("cuMemAlloc"), 2u);
}

TEST(faults_by_chance_are_about_as_many_as_asked_for) {
    Program program(FAKE_CUDA, {});
    program.control().exempt_thread(false);
    program.control().arm_fault({.per_mille = 100, .status = kCudaNotSupported});
    int failed = 0;
    CudaAddress address = 0;
    for (int calls = 0; calls < 1000; ++calls) {
        failed += program.api().cuMemAlloc(&address, 64) == kCudaNotSupported ? 1 : 0;
    }
    CHECK(failed > 50 && failed < 200);
}

TEST(a_lost_device_stays_lost_and_runs_nothing) {
    Program program(FAKE_CUDA, {});
    const CudaStream stream = program.open_stream();
    const CudaEvent event = program.open_event();
    const CudaAddress page = program.allocate_device(kBytes);
    program.control().stall(true);
    program.compute(stream, {}, {{page, kBytes}}, 5);
    program.record(event, stream);
    program.control().lose_device(fake::kLaunchFailed);
    CHECK_EQUAL(program.api().cuEventQuery(event), fake::kLaunchFailed);
    CHECK_EQUAL(program.api().cuStreamSynchronize(stream), fake::kLaunchFailed);
    CHECK(!holds_pattern(program, page, 5));
    CHECK_EQUAL(program.api().cuMemFree(page), fake::kLaunchFailed);
    CHECK_EQUAL(program.control().live().device_allocations, 0u);
}

TEST(a_fault_strikes_the_function_it_names) {
    Program program(FAKE_CUDA, {});
    fake::Control& control = program.control();
    const CudaEvent event = program.open_event();
    control.exempt_thread(false);
    control.arm_fault({.call = 2, .status = fake::kOutOfMemory, .function = "cuMemAlloc"});
    CHECK_EQUAL(control.struck_calls(), 0u);
    CHECK_EQUAL(control.struck_function(), "");
    CudaAddress address = 0;
    CHECK_EQUAL(program.api().cuEventQuery(event), kCudaSuccess);
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 64), kCudaSuccess);
    CHECK_EQUAL(program.api().cuEventQuery(event), kCudaSuccess);
    CHECK_EQUAL(control.struck_calls(), 0u);
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 64), fake::kOutOfMemory);
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 64), kCudaSuccess);
    CHECK_EQUAL(control.struck_calls(), 1u);
    CHECK_EQUAL(control.struck_function(), "cuMemAlloc");
    CHECK_EQUAL(control.counted_calls(), 3u);
    control.arm_fault({});
    CHECK_EQUAL(control.struck_calls(), 0u);
    CHECK_EQUAL(control.struck_function(), "");
}

TEST(no_fault_strikes_an_exempt_thread) {
    Program program(FAKE_CUDA, {});
    program.control().arm_fault({.per_mille = 1000});
    CudaAddress address = 0;
    CHECK_EQUAL(program.api().cuMemAlloc(&address, 64), kCudaSuccess);
    CHECK_EQUAL(program.control().struck_calls(), 0u);
}

// Others get on meanwhile: a copy that was asked for before is done when the call returns. On a busy machine its thread
// may get no processor in that time, so that more tries are needed.
TEST(a_slow_call_returns_late_and_does_its_work) {
    int late = 0;
    for (std::uint64_t seed = 1; seed <= 20 || (late == 0 && seed <= 1000); ++seed) {
        Program program(FAKE_CUDA, {.seed = seed, .missing = {}});
        Copy copy(program);
        CHECK_EQUAL(copy.start(), kCudaSuccess);
        program.record(copy.done, copy.stream);
        program.control().exempt_thread(false);
        program.control().arm_fault({.call = 1, .kind = FaultKind::call_is_slow, .function = "cuMemAlloc"});
        CudaAddress address = 0;
        CHECK_EQUAL(program.api().cuMemAlloc(&address, 64), kCudaSuccess);
        CHECK(address != 0);
        CHECK_EQUAL(program.control().struck_function(), "cuMemAlloc");
        late += program.api().cuEventQuery(copy.done) == kCudaSuccess ? 1 : 0;
        program.poll(copy.done);
        CHECK_EQUAL(copy.bytes_there(), kBytes);
    }
    CHECK(late > 0);
}

TEST(a_code_of_one_call_loses_nothing) {
    for (const int status : {fake::kInvalidValue, fake::kOutOfMemory, 201, 701, fake::kCaptureUnsupported}) {
        Program program(FAKE_CUDA, {});
        Copy copy(program);
        program.control().exempt_thread(false);
        program.control().arm_fault({.call = 1, .status = status, .function = "cuEventQuery"});
        CHECK_EQUAL(copy.start(), kCudaSuccess);
        program.record(copy.done, copy.stream);
        CHECK_EQUAL(program.api().cuEventQuery(copy.done), status);
        program.poll(copy.done);
        CHECK_EQUAL(copy.bytes_there(), kBytes);
    }
}

// Nothing is known when the call is made; then everything is lost, at whatever point the copy was.
TEST(an_operation_that_fails_loses_the_device_when_it_runs) {
    std::set<std::size_t> moved;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
        Program program(FAKE_CUDA, {.seed = seed, .missing = {}});
        Copy copy(program);
        const CudaAddress other_page = program.allocate_device(kBytes);
        program.control().exempt_thread(false);
        program.control().arm_fault({.call = 1,
                                     .status = fake::kIllegalAddress,
                                     .kind = FaultKind::operation_fails,
                                     .function = "cuMemcpyBatchAsync"});
        program.control().stall(true);
        CHECK_EQUAL(copy.start(), kCudaSuccess);
        program.compute(copy.stream, {}, {{other_page, kBytes}}, 6);
        CHECK_EQUAL(program.api().cuEventRecord(copy.done, copy.stream), kCudaSuccess);
        CHECK_EQUAL(program.control().struck_function(), "cuMemcpyBatchAsync");
        program.control().stall(false);
        CHECK_EQUAL(program.ask(copy.done), fake::kIllegalAddress);
        // Memory that the host sees does not change from here on.
        const std::size_t there = copy.bytes_there();
        moved.insert(there);
        for (int calls = 0; calls < 20; ++calls) {
            CudaAddress address = 0;
            CHECK_EQUAL(program.api().cuMemAlloc(&address, 64), fake::kIllegalAddress);
        }
        CHECK_EQUAL(copy.bytes_there(), there);
        CHECK_EQUAL(program.api().cuStreamSynchronize(copy.stream), fake::kIllegalAddress);
        CHECK(!holds_pattern(program, other_page, 6));
    }
    CHECK(moved.size() > 5);
}

// The call that tells of the loss returns when nothing moves any more, in no stream.
TEST(nothing_moves_once_a_call_has_told_of_the_loss) {
    for (std::uint64_t seed = 1; seed <= 100; ++seed) {
        Program program(FAKE_CUDA, {.seed = seed, .missing = {}, .turns = 4000});
        std::array<Copy, 4> copies = {Copy(program), Copy(program), Copy(program), Copy(program)};
        program.control().exempt_thread(false);
        program.control().arm_fault({.call = 1, .status = fake::kLaunchFailed, .kind = FaultKind::operation_fails});
        program.control().stall(true);
        for (const Copy& copy : copies) {
            CHECK_EQUAL(copy.start(), kCudaSuccess);
            program.record(copy.done, copy.stream);
        }
        program.control().stall(false);
        CHECK_EQUAL(program.ask(copies[0].done), fake::kLaunchFailed);
        for (const Copy& copy : copies) {
            std::fill_n(copy.slot, kBytes, std::uint8_t{0xee});
        }
        for (int calls = 0; calls < 1000; ++calls) {
            CHECK_EQUAL(program.api().cuStreamQuery(copies[0].stream), fake::kLaunchFailed);
        }
        for (const Copy& copy : copies) {
            CHECK(std::all_of(copy.slot, copy.slot + kBytes, [](std::uint8_t byte) { return byte == 0xee; }));
        }
    }
}

TEST(only_sticky_codes_lose_a_device) {
    Program program(FAKE_CUDA, {});
    fake::Control& control = program.control();
    control.keep_reports(true);
    control.arm_fault({.call = 1, .status = fake::kInvalidValue, .loses_device = true});
    control.arm_fault({.call = 1, .status = fake::kCaptureUnsupported, .kind = FaultKind::operation_fails});
    control.lose_device(701);
    CHECK_EQUAL(control.take_reports().size(), 3u);
    control.keep_reports(false);
    program.synchronize(program.open_stream());
}
