// Programs with a race, which the checker has to find under every seed, and the same programs put right, of which it
// has to say nothing.
#include <array>
#include <thread>

#include "check.hpp"
#include "fake_cuda/planted.hpp"

using namespace kvo;
using fake::address_of_host;
using fake::kBlock;
using fake::Planted;
using fake::Scene;

namespace {

void save_without_waiting(Scene& scene, bool is_right) {
    scene.write_page();
    scene.program.record(scene.event, scene.compute);
    if (is_right) {
        scene.program.wait(scene.copies, scene.event);
    }
    scene.save();
}

void event_recorded_too_early(Scene& scene, bool is_right) {
    if (!is_right) {
        scene.program.record(scene.event, scene.compute);
    }
    scene.write_page();
    if (is_right) {
        scene.program.record(scene.event, scene.compute);
    }
    scene.program.wait(scene.copies, scene.event);
    scene.save();
}

// A wait holds for the record before it, not for one that comes later.
void wait_before_the_record(Scene& scene, bool is_right) {
    scene.write_page();
    if (is_right) {
        scene.program.record(scene.event, scene.compute);
    }
    scene.program.wait(scene.copies, scene.event);
    scene.program.record(scene.event, scene.compute);
    scene.save();
}

void block_reused_before_its_save_finished(Scene& scene, bool is_right) {
    scene.write_page();
    scene.program.record(scene.event, scene.compute);
    scene.program.wait(scene.copies, scene.event);
    scene.save();
    scene.program.record(scene.done, scene.copies);
    if (is_right) {
        scene.program.poll(scene.done);
    }
    scene.write_page();
}

void load_overtaken_by_compute(Scene& scene, bool is_right) {
    scene.program.control().host_writes(scene.slot, kBlock);
    scene.load();
    scene.program.record(scene.done, scene.copies);
    if (is_right) {
        scene.program.wait(scene.compute, scene.done);
    }
    scene.read_page();
}

void load_into_a_page_in_use(Scene& scene, bool is_right) {
    scene.read_page();
    scene.program.record(scene.event, scene.compute);
    if (is_right) {
        scene.program.wait(scene.copies, scene.event);
    }
    scene.load();
}

void host_reads_before_polling(Scene& scene, bool is_right) {
    scene.save();
    scene.program.record(scene.done, scene.copies);
    if (is_right) {
        scene.program.poll(scene.done);
    }
    scene.program.control().host_reads(scene.slot, kBlock);
}

void host_writes_under_a_load(Scene& scene, bool is_right) {
    scene.load();
    if (is_right) {
        scene.program.synchronize(scene.copies);
    }
    scene.program.control().host_writes(scene.slot + kBlock - 1, 1);
}

void memory_freed_under_a_copy(Scene& scene, bool is_right) {
    scene.save();
    if (is_right) {
        scene.program.synchronize(scene.copies);
    }
    CHECK_EQUAL(scene.program.api().cuMemFree(scene.page), kCudaSuccess);
}

void memory_unregistered_under_a_copy(Scene& scene, bool is_right) {
    static std::array<std::uint8_t, kBlock> memory;
    CHECK_EQUAL(scene.program.api().cuMemHostRegister(memory.data(), kBlock, 0), kCudaSuccess);
    scene.program.copy(address_of_host(memory.data()), scene.page, kBlock, scene.copies);
    if (is_right) {
        scene.program.synchronize(scene.copies);
    }
    CHECK_EQUAL(scene.program.api().cuMemHostUnregister(memory.data()), kCudaSuccess);
    scene.program.synchronize(scene.copies);
}

// Gathered into staging on one stream, sent to the host on another, then gathered again.
void staging_reused_too_early(Scene& scene, bool is_right) {
    const CudaAddress staging = scene.program.allocate_device(kBlock);
    const auto gather = [&] { scene.program.compute(scene.compute, {{scene.page, kBlock}}, {{staging, kBlock}}); };
    gather();
    scene.program.record(scene.event, scene.compute);
    scene.program.wait(scene.copies, scene.event);
    scene.program.copy(address_of_host(scene.slot), staging, kBlock, scene.copies);
    scene.program.record(scene.done, scene.copies);
    if (is_right) {
        scene.program.wait(scene.compute, scene.done);
    }
    gather();
}

// Copies in stream order are after the kernel before them; copies in any order are not.
void batch_reads_out_of_stream_order(Scene& scene, bool is_right) {
    scene.program.compute(scene.copies, {}, {{scene.page, kBlock}});
    CudaAddress destination = address_of_host(scene.slot);
    std::size_t bytes = kBlock;
    std::size_t start = 0;
    std::size_t failed = 0;
    CudaCopyAttributes attributes;
    attributes.source_access_order = is_right ? CudaCopyAttributes::kSourceInStreamOrder : 3;
    CHECK_EQUAL(scene.program.api().cuMemcpyBatchAsync(&destination, &scene.page, &bytes, 1, &attributes, &start, 1,
                                                       &failed, scene.copies),
                kCudaSuccess);
}

void batch_entries_overlap(Scene& scene, bool is_right) {
    const std::size_t step = is_right ? kBlock / 2 : kBlock / 2 - 1;
    std::array<CudaAddress, 2> destinations = {address_of_host(scene.slot), address_of_host(scene.slot) + step};
    std::array<CudaAddress, 2> sources = {scene.page, scene.page + kBlock / 2};
    std::array<std::size_t, 2> sizes = {kBlock / 2, kBlock / 2};
    std::size_t start = 0;
    std::size_t failed = 0;
    CudaCopyAttributes attributes;
    CHECK_EQUAL(scene.program.api().cuMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), 2,
                                                       &attributes, &start, 1, &failed, scene.copies),
                kCudaSuccess);
}

void copy_leaves_its_allocation(Scene& scene, bool is_right) {
    scene.program.copy(address_of_host(scene.slot), scene.page, is_right ? kBlock : kBlock + 1, scene.copies);
}

void copy_to_memory_never_registered(Scene& scene, bool is_right) {
    static std::array<std::uint8_t, 64> memory;
    scene.program.copy(address_of_host(is_right ? scene.slot : memory.data()), scene.page, 64, scene.copies);
}

// The kernel's lists are memory as any other.
void kernel_list_rewritten_too_early(Scene& scene, bool is_right) {
    fake::CopyKernel kernel(scene.program);
    kernel.write_list(scene.page, kernel.mapped(scene.slot), kBlock);
    kernel.launch(kernel.mapped(kernel.list()), scene.copies);
    if (is_right) {
        scene.program.synchronize(scene.copies);
    }
    scene.program.control().host_writes(kernel.list(), 8);
}

void kernel_list_copied_over(Scene& scene, bool is_right) {
    fake::CopyKernel kernel(scene.program);
    const CudaAddress list = scene.program.allocate_device(fake::CopyKernel::kListBytes);
    kernel.write_list(scene.page, kernel.mapped(scene.slot), kBlock);
    const auto copy_list = [&](CudaStream stream) {
        scene.program.copy(list, address_of_host(kernel.list()), fake::CopyKernel::kListBytes, stream);
    };
    copy_list(scene.copies);
    scene.program.synchronize(scene.copies);
    kernel.launch(list, scene.copies);
    scene.program.record(scene.event, scene.copies);
    if (is_right) {
        scene.program.wait(scene.compute, scene.event);
    }
    copy_list(scene.compute);
}

void kernel_source_overwritten(Scene& scene, bool is_right) {
    fake::CopyKernel kernel(scene.program);
    kernel.write_list(scene.page + kBlock - 1, kernel.mapped(scene.slot), 1);
    kernel.launch(kernel.mapped(kernel.list()), scene.copies);
    scene.program.record(scene.event, scene.copies);
    if (is_right) {
        scene.program.wait(scene.compute, scene.event);
    }
    scene.write_page();
}

void kernel_destination_read_too_early(Scene& scene, bool is_right) {
    fake::CopyKernel kernel(scene.program);
    kernel.write_list(scene.page, kernel.mapped(scene.slot) + kBlock - 1, 1);
    kernel.launch(kernel.mapped(kernel.list()), scene.copies);
    if (is_right) {
        scene.program.synchronize(scene.copies);
    }
    scene.program.control().host_reads(scene.slot, kBlock);
}

// A thread does not know of events that another thread has seen, until it is told.
void another_thread_saw_it(Scene& scene, bool is_right) {
    scene.program.control().keep_own_clock(true);
    scene.save();
    scene.program.record(scene.done, scene.copies);
    std::thread([&] {
        CHECK_EQUAL(scene.program.api().cuCtxSetCurrent(scene.program.context()), kCudaSuccess);
        scene.program.poll(scene.done);
    }).join();
    if (is_right) {
        scene.program.control().hear_others();
    }
    scene.program.control().host_reads(scene.slot, kBlock);
}

constexpr std::array kPlanted = {
    Planted{"save without waiting", save_without_waiting, "race: "},
    Planted{"event recorded too early", event_recorded_too_early, "race: "},
    Planted{"wait before the record", wait_before_the_record, "race: "},
    Planted{"block reused before its save finished", block_reused_before_its_save_finished, "race: "},
    Planted{"load overtaken by compute", load_overtaken_by_compute, "race: "},
    Planted{"load into a page in use", load_into_a_page_in_use, "race: "},
    Planted{"host reads before polling", host_reads_before_polling, "race: "},
    Planted{"host writes under a load", host_writes_under_a_load, "race: "},
    Planted{"memory freed under a copy", memory_freed_under_a_copy, ""},
    Planted{"memory unregistered under a copy", memory_unregistered_under_a_copy, ""},
    Planted{"staging reused too early", staging_reused_too_early, "race: "},
    Planted{"batch reads out of stream order", batch_reads_out_of_stream_order, "race: "},
    Planted{"batch entries overlap", batch_entries_overlap, "overlaps another part of the same operation"},
    Planted{"copy leaves its allocation", copy_leaves_its_allocation, "which ends at 0x1000"},
    Planted{"copy to memory never registered", copy_to_memory_never_registered, "no memory that the driver knows"},
    Planted{"kernel list rewritten too early", kernel_list_rewritten_too_early, "race: "},
    Planted{"kernel list copied over", kernel_list_copied_over, "race: "},
    Planted{"kernel source overwritten", kernel_source_overwritten, "race: "},
    Planted{"kernel destination read too early", kernel_destination_read_too_early, "race: "},
    Planted{"another thread saw it", another_thread_saw_it, "race: "},
};

}  // namespace

TEST(planted_races_are_found_under_every_seed) { fake::check_found(kPlanted, {}); }

TEST(the_same_programs_put_right_are_not_reported) { fake::check_not_reported(kPlanted, {}); }

TEST(a_report_names_both_operations) {
    Scene scene({.seed = 3, .missing = {}});
    scene.program.control().name_step("decode");
    scene.write_page();
    scene.program.control().name_step("saving");
    scene.save();
    scene.finish();
    const auto reports = scene.program.control().take_reports();
    CHECK_EQUAL(reports.size(), 1u);
    for (const char* part : {"compute on stream 1 (call ", ", in decode)", "cuMemcpyAsync on stream 2 (call ",
                             ", in saving)", "device memory 1 + 0x0..0x1000", "no order between them"}) {
        CHECK(reports.front().find(part) != std::string::npos);
    }
}
