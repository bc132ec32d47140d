#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include "check.hpp"
#include "copy/copy_runs.hpp"
#include "fake_cuda/fake_program.hpp"
#include "fake_cuda/happens_before.hpp"

using namespace kvo;
using fake::address_of_host;
using fake::Program;

namespace {

constexpr std::size_t kBytes = 8192;

std::vector<std::uint8_t> pattern_bytes(std::uint64_t pattern, std::size_t count) {
    std::vector<std::uint8_t> bytes(count);
    for (std::size_t i = 0; i < count; ++i) {
        bytes[i] = fake::pattern_byte(pattern, i);
    }
    return bytes;
}

}  // namespace

TEST(bytes_go_there_and_back) {
    for (std::uint64_t seed = 1; seed <= 50; ++seed) {
        Program program(FAKE_CUDA, {.seed = seed, .missing = {}});
        const CudaStream stream = program.open_stream();
        const CudaAddress page = program.allocate_device(kBytes);
        const CudaAddress other = program.allocate_device(kBytes);
        std::uint8_t* const slot = program.allocate_host(kBytes);
        program.compute(stream, {}, {{page, kBytes}}, seed);
        program.copy(address_of_host(slot), page, kBytes, stream);
        program.copy(other, address_of_host(slot), kBytes, stream);
        program.synchronize(stream);
        CHECK(std::ranges::equal(std::span(slot, kBytes), pattern_bytes(seed, kBytes)));
        std::vector<std::uint8_t> seen(kBytes);
        program.control().peek(other, seen);
        CHECK(seen == pattern_bytes(seed, kBytes));
    }
}

// A delayed stream must be seen late, else nothing above says anything about order.
TEST(operations_are_late_and_polls_see_it) {
    int not_ready = 0;
    for (std::uint64_t seed = 1; seed <= 50; ++seed) {
        Program program(FAKE_CUDA, {.seed = seed, .missing = {}});
        const CudaStream stream = program.open_stream();
        const CudaEvent event = program.open_event();
        CHECK_EQUAL(program.api().cuEventQuery(event), kCudaSuccess);  // never recorded
        program.compute(stream, {}, {{program.allocate_device(64), 64}});
        program.record(event, stream);
        not_ready += program.api().cuEventQuery(event) == kCudaNotReady ? 1 : 0;
        program.poll(event);
        CHECK_EQUAL(program.api().cuStreamQuery(stream), kCudaSuccess);
    }
    CHECK(not_ready > 0);
}

TEST(nothing_runs_while_it_is_stalled) {
    Program program(FAKE_CUDA, {});
    const CudaStream stream = program.open_stream();
    const CudaEvent event = program.open_event();
    program.control().stall(true);
    program.record(event, stream);
    for (int polls = 0; polls < 1000; ++polls) {
        CHECK_EQUAL(program.api().cuEventQuery(event), kCudaNotReady);
    }
    program.control().stall(false);
    program.poll(event);
}

// A test that would hang says where.
TEST(what_waits_without_an_end_is_reported) {
    fake::Settings settings;
    settings.patience_ms = 1;
    Program program(FAKE_CUDA, settings);
    program.control().keep_reports(true);
    const CudaStream stream = program.open_stream();
    const CudaEvent event = program.open_event();
    program.control().stall(true);
    program.record(event, stream);
    CHECK_EQUAL(program.ask(event), kCudaNotReady);
    CHECK_EQUAL(program.api().cuStreamSynchronize(stream), kCudaNotReady);
    CHECK_EQUAL(program.api().cuEventSynchronize(event), kCudaNotReady);
    const auto reports = program.control().take_reports();
    CHECK_EQUAL(reports.size(), 2u);
    CHECK_EQUAL(reports[0], "cuStreamSynchronize of a stream that gets no further");
    CHECK_EQUAL(reports[1], "cuEventSynchronize of an event that does not come");
    program.control().keep_reports(false);
}

TEST(a_wait_that_spins_is_reported) {
    Program program(FAKE_CUDA, {});
    program.control().keep_reports(true);
    CudaEvent event = nullptr;
    CHECK_EQUAL(program.api().cuEventCreate(&event, kCudaEventDisableTiming), kCudaSuccess);
    CHECK_EQUAL(program.api().cuEventSynchronize(event), kCudaInvalidValue);
    CHECK_EQUAL(program.control().take_reports().at(0),
                "cuEventSynchronize of an event that is not CU_EVENT_BLOCKING_SYNC, which spins");
    program.control().keep_reports(false);
}

TEST(the_kernel_copies_what_its_lists_say) {
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
        Program program(FAKE_CUDA, {.seed = seed, .missing = {}});
        const CudaApi& api = program.api();
        CudaModule module = nullptr;
        CudaFunction function = nullptr;
        CHECK_EQUAL(api.cuModuleLoadData(&module, "image"), kCudaSuccess);
        CHECK_EQUAL(api.cuModuleGetFunction(&function, module, "kvo_copy_runs"), kCudaSuccess);
        CHECK_EQUAL(api.cuModuleGetFunction(&function, module, "kvo_copy_runs_of_another_build"), fake::kNotFound);
        const CudaStream stream = program.open_stream();
        const CudaAddress pages = program.allocate_device(kBytes);
        const CudaAddress staging = program.allocate_device(kBytes);
        const CudaAddress lists = program.allocate_device(3 * 8 * 8);
        auto* const written = reinterpret_cast<std::uint64_t*>(program.allocate_host(3 * 8 * 8));
        for (std::uint64_t run = 0; run < 8; ++run) {  // every second 512 bytes, in reverse
            written[run] = pages + (7 - run) * 1024;
            written[8 + run] = staging + run * 512;
            written[16 + run] = 512;
        }
        program.compute(stream, {}, {{pages, kBytes}}, seed);
        program.copy(lists, address_of_host(written), 3 * 8 * 8, stream);
        std::array<std::uint64_t, 4> runs = {lists, lists + 64, lists + 128, 8};
        std::uint32_t team_size = 32;
        std::array<void*, 2> parameters = {runs.data(), &team_size};
        CHECK_EQUAL(api.cuLaunchKernel(function, 2, 1, 1, 64, 1, 1, 0, stream, parameters.data(), nullptr),
                    kCudaSuccess);
        program.synchronize(stream);
        std::vector<std::uint8_t> gathered(4096);
        program.control().peek(staging, gathered);
        const auto all = pattern_bytes(seed, kBytes);
        for (std::size_t run = 0; run < 8; ++run) {
            CHECK(std::memcmp(&gathered[run * 512], &all[(7 - run) * 1024], 512) == 0);
        }
    }
}

TEST(a_thread_without_a_context_can_do_nothing) {
    Program program(FAKE_CUDA, {});
    CHECK_EQUAL(program.api().cuCtxSetCurrent(nullptr), kCudaSuccess);
    CudaStream stream = nullptr;
    CHECK_EQUAL(program.api().cuStreamCreateWithPriority(&stream, 0, 0), fake::kInvalidContext);
    CHECK_EQUAL(program.api().cuDevicePrimaryCtxRelease(10), kCudaSuccess);
    CHECK_EQUAL(program.api().cuCtxSetCurrent(program.context()), fake::kInvalidContext);
    CHECK(program.control().live() == fake::Live{});
}

// Random accesses by random actors, against the definition: two accesses race if they share a byte, one of them writes,
// and the first is not part of what the second knows.
TEST(the_history_finds_what_the_definition_finds) {
    struct Access {
        fake::AccessRange range;
        bool writes;
        fake::Actor actor;
        std::uint64_t count;
    };
    std::mt19937_64 random(11);
    int races = 0;
    for (int round = 0; round < 2000; ++round) {
        fake::AccessHistory history;
        std::array<fake::VectorClock, 4> clocks;
        std::vector<Access> accesses;
        for (int step = 0; step < 8; ++step) {
            const fake::Actor actor = random() % clocks.size();
            if (random() % 4 != 0) {
                clocks[actor].join(clocks[random() % clocks.size()]);
            }
            const std::uint64_t begin = random() % 60;
            const Access access{
                {begin, begin + 1 + random() % 10}, random() % 3 == 0, actor, clocks[actor].tick(actor)};
            const bool expected = std::ranges::any_of(accesses, [&](const Access& earlier) {
                return earlier.range.begin < access.range.end && access.range.begin < earlier.range.end &&
                       (earlier.writes || access.writes) && clocks[actor].at(earlier.actor) < earlier.count;
            });
            const auto race =
                history.record(access.range, access.writes ? fake::AccessKind::write : fake::AccessKind::read,
                               {access.actor, access.count, false, nullptr}, clocks[actor]);
            CHECK_EQUAL(race.has_value(), expected);
            if (expected) {
                ++races;
                break;  // behind the first race the history may forget
            }
            accesses.push_back(access);
        }
    }
    CHECK(races > 200 && races < 1800);
}

TEST(the_history_forgets_memory_that_is_gone) {
    fake::AccessHistory history;
    fake::VectorClock writer;
    history.record({100, 200}, fake::AccessKind::write, {1, writer.tick(1), false, nullptr}, writer);
    history.forget({120, 180});
    const fake::VectorClock nobody;
    CHECK(!history.record({120, 180}, fake::AccessKind::read, {2, 1, false, nullptr}, nobody));
    CHECK(history.record({119, 120}, fake::AccessKind::read, {2, 1, false, nullptr}, nobody));
    CHECK(history.record({180, 181}, fake::AccessKind::read, {2, 1, false, nullptr}, nobody));
}

TEST(a_stream_that_waits_for_the_legacy_stream_is_reported) {
    Program program(FAKE_CUDA, {});
    program.control().keep_reports(true);
    CudaStream stream = nullptr;
    CHECK_EQUAL(program.api().cuStreamCreateWithPriority(&stream, 0, 0), kCudaInvalidValue);
    CHECK_EQUAL(program.control().take_reports().size(), 1u);
    program.control().keep_reports(false);
    CHECK(program.open_stream() != nullptr);
}
