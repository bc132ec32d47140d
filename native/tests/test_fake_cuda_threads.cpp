// Races of host threads with copies and with one another, where each thread has a clock of its own.
#include <array>
#include <memory>

#include "check.hpp"
#include "fake_cuda/planted.hpp"

using namespace kvo;
using fake::address_of_host;
using fake::kBlock;
using fake::Planted;
using fake::Scene;

namespace {

constexpr std::uint64_t kToken = 7;

fake::Settings own_clocks() {
    fake::Settings settings;
    settings.threads_have_clocks = true;
    return settings;
}

// A load by way of a bounce buffer, and the next one.
void bounce_buffer_reused_too_early(Scene& scene, bool is_right) {
    scene.program.control().host_writes(scene.slot, kBlock);
    scene.load();
    scene.program.record(scene.done, scene.copies);
    if (is_right) {
        scene.program.poll(scene.done);
    }
    scene.program.control().host_writes(scene.slot, kBlock);
    scene.load();
}

// The event says nothing of what the stream took in after it.
void bounce_buffer_reused_by_an_old_event(Scene& scene, bool is_right) {
    scene.program.control().host_writes(scene.slot, kBlock);
    if (!is_right) {
        scene.program.record(scene.done, scene.copies);
    }
    scene.load();
    if (is_right) {
        scene.program.record(scene.done, scene.copies);
    }
    scene.program.poll(scene.done);
    scene.program.control().host_writes(scene.slot, kBlock);
}

void slot_read_without_a_hand_over(Scene& scene, bool is_right) {
    scene.save();
    scene.program.record(scene.done, scene.copies);
    scene.program.poll(scene.done);
    scene.program.control().release(is_right ? kToken : kToken + 1);
    scene.run_thread([&] {
        scene.program.control().acquire(kToken);
        scene.program.control().host_reads(scene.slot, kBlock);
    });
}

void released_before_the_event_was_seen(Scene& scene, bool is_right) {
    scene.save();
    scene.program.record(scene.done, scene.copies);
    if (!is_right) {
        scene.program.control().release(kToken);
    }
    scene.program.poll(scene.done);
    if (is_right) {
        scene.program.control().release(kToken);
    }
    scene.run_thread([&] {
        scene.program.control().acquire(kToken);
        scene.program.control().host_reads(scene.slot, kBlock);
    });
}

// A thread that asks the event itself needs no hand-over.
void slot_read_by_who_did_not_ask(Scene& scene, bool is_right) {
    scene.save();
    scene.program.record(scene.done, scene.copies);
    scene.run_thread([&] {
        if (is_right) {
            scene.program.poll(scene.done);
        }
        scene.program.control().host_reads(scene.slot, kBlock);
    });
}

void slot_written_by_one_and_loaded_by_another(Scene& scene, bool is_right) {
    scene.program.control().host_writes(scene.slot, kBlock);
    if (is_right) {
        scene.program.control().release(kToken);
    }
    scene.run_thread([&] {
        scene.program.control().acquire(kToken);
        scene.load();
    });
}

void slot_written_by_two(Scene& scene, bool is_right) {
    const auto slot = std::make_unique<std::array<std::uint8_t, 64>>();  // which the driver does not know
    scene.program.control().host_writes(slot->data(), 64);
    if (is_right) {
        scene.program.control().release(kToken);
    }
    scene.run_thread([&] {
        scene.program.control().acquire(kToken);
        scene.program.control().host_writes(slot->data() + 63, 1);
    });
}

// The one who takes a buffer back has to hear from the one who read it last.
void buffer_taken_back_while_it_is_read(Scene& scene, bool is_right) {
    scene.save();
    scene.program.synchronize(scene.copies);
    scene.program.control().release(kToken);
    scene.run_thread([&] {
        scene.program.control().acquire(kToken);
        scene.program.control().host_reads(scene.slot, kBlock);
        if (is_right) {
            scene.program.control().release(kToken + 1);
        }
    });
    scene.program.control().acquire(kToken + 1);
    scene.save();
}

// Written here, copied to the device for a kernel, and written again for the next.
void pinned_list_rewritten_too_early(Scene& scene, bool is_right) {
    fake::CopyKernel kernel(scene.program);
    const CudaAddress list = scene.program.allocate_device(fake::CopyKernel::kListBytes);
    kernel.write_list(scene.page, kernel.mapped(scene.slot), kBlock);
    scene.program.copy(list, address_of_host(kernel.list()), fake::CopyKernel::kListBytes, scene.copies);
    scene.program.record(scene.done, scene.copies);
    kernel.launch(list, scene.copies);
    if (is_right) {
        scene.program.poll(scene.done);
    }
    scene.program.control().host_writes(kernel.list(), fake::CopyKernel::kListBytes);
}

void mapped_list_rewritten_too_early(Scene& scene, bool is_right) {
    fake::CopyKernel kernel(scene.program);
    kernel.write_list(scene.page, kernel.mapped(scene.slot), kBlock);
    if (!is_right) {
        scene.program.record(scene.done, scene.copies);
    }
    kernel.launch(kernel.mapped(kernel.list()), scene.copies);
    if (is_right) {
        scene.program.record(scene.done, scene.copies);
    }
    scene.program.poll(scene.done);
    scene.program.control().host_writes(kernel.list() + 2, 8);
}

constexpr std::array kPlanted = {
    Planted{"bounce buffer reused too early", bounce_buffer_reused_too_early, "race: "},
    Planted{"bounce buffer reused by an old event", bounce_buffer_reused_by_an_old_event, "race: "},
    Planted{"slot read without a hand-over", slot_read_without_a_hand_over, "race: "},
    Planted{"released before the event was seen", released_before_the_event_was_seen, "race: "},
    Planted{"slot read by who did not ask", slot_read_by_who_did_not_ask, "race: "},
    Planted{"slot written by one and loaded by another", slot_written_by_one_and_loaded_by_another, "race: "},
    Planted{"slot written by two", slot_written_by_two, "race: "},
    Planted{"buffer taken back while it is read", buffer_taken_back_while_it_is_read, "race: "},
    Planted{"pinned list rewritten too early", pinned_list_rewritten_too_early, "race: "},
    Planted{"mapped list rewritten too early", mapped_list_rewritten_too_early, "race: "},
};

}  // namespace

TEST(planted_races_are_found_under_every_seed) { fake::check_found(kPlanted, own_clocks()); }

TEST(the_same_programs_put_right_are_not_reported) { fake::check_not_reported(kPlanted, own_clocks()); }

TEST(a_report_names_the_thread) {
    Scene scene(own_clocks());
    slot_written_by_two(scene, false);
    const auto reports = scene.program.control().take_reports();
    CHECK_EQUAL(reports.size(), 1u);
    CHECK(reports.front().find("the host, thread ") != std::string::npos);
    CHECK(reports.front().find("host memory at 0x") != std::string::npos);
}
