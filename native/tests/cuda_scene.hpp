// A CUDA engine on the driver made for tests: pages of two groups, slots for them, and a model that computes at the
// same time.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "copy/cuda_engine.hpp"
#include "digest/digest.hpp"
#include "fake_cuda/fake_program.hpp"

namespace kvo::test {

inline constexpr std::uint32_t kBlocks = 6;
inline constexpr int kPatienceMs = 60000;

struct SceneSettings {
    CopyWay way = CopyWay::batch;
    fake::Settings driver;
    bool has_digests = false;
    std::uint64_t registered_bytes = 4096;  // of the slots; the others go through the bounce buffer
    bool waits_for_registration = false;
    bool has_room = false;  // for all parts of any plan at once
};

inline constexpr std::array kWays = {CopyWay::batch, CopyWay::staged, CopyWay::mapped};
inline constexpr CopyDirection kSave = CopyDirection::save;
inline constexpr CopyDirection kLoad = CopyDirection::load;

// All slots are registered from the beginning, and any plan is with the device at once.
inline SceneSettings with_room(CopyWay way) {
    SceneSettings settings;
    settings.way = way;
    settings.registered_bytes = 3 * 4096;
    settings.waits_for_registration = true;
    settings.has_room = true;
    return settings;
}

// Ends a test that waits for what does not come.
class Patience {
public:
    void wait() {
        if (Clock::now() > end_) {
            throw std::runtime_error("waited for a minute");
        }
        sched_yield();
    }

private:
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end_ = Clock::now() + std::chrono::milliseconds(kPatienceMs);
};

// Host memory has this alignment so that a range of it can be registered whole.
struct alignas(4096) HostPage {
    std::uint8_t bytes[4096] = {};
};

class CudaScene {
public:
    explicit CudaScene(const SceneSettings& settings)
        : settings_(settings), program_(FAKE_CUDA, settings.driver), control_(program_.control()) {
        control_.keep_own_clock(true);
        pages_.block_count = kBlocks;
        // Large runs that touch in pairs of blocks; and small ones, of odd lengths at odd places.
        add_group({{400, 400}, {256, 512}, {64, 64}});
        add_group({{30, 33}, {7, 7}, {97, 128}, {16, 16}});
        compute_ = program_.open_stream();
    }
    // A test that failed halfway leaves an engine that can close.
    ~CudaScene() {
        control_.stall(false);
        control_.arm_fault({});
        engine_.reset();
        control_.keep_own_clock(false);
    }
    CudaScene(const CudaScene&) = delete;
    CudaScene& operator=(const CudaScene&) = delete;

    fake::Control& control() { return control_; }
    fake::Program& program() { return program_; }
    CudaEngine& engine() { return *engine_; }
    const PageTable& pages() const { return pages_; }

    CudaSettings engine_settings() {
        CudaSettings settings;
        settings.limits.plans = 16;
        settings.ways.clear();
        for (const CopyDirection direction : {CopyDirection::save, CopyDirection::load}) {
            settings.ways.push_back({direction, UINT64_MAX, UINT64_MAX, settings_.way});
        }
        // Small, so that plans take several parts, and what these have is used again and again.
        settings.buffer_bytes = 1024;
        settings.kernel_entries = 7;
        settings.list_bytes = 400;
        settings.batch_entries = 5;
        settings.batch_bytes = 2000;
        settings.parts = 8;
        settings.kernel_blocks = 1;
        settings.kernel_threads = 32;
        settings.piece_bytes = 4096;
        settings.queued_transfers = 12;
        if (settings_.has_room) {
            settings.list_bytes = 65536;
            settings.parts = 64;
            settings.queued_transfers = 1000;
        }
        settings.strange_answers = std::chrono::milliseconds(2);
        settings.digest_threads = 2;
        settings.poll_interval = std::chrono::microseconds(1);
        settings.longest_sleep = std::chrono::minutes(10);  // who sleeps is woken, or the test does not end
        static constexpr std::byte kImage{1};
        settings.kernels = {&kImage, 1};
        settings.on_host_access = [this](const void* address, std::uint64_t length, bool is_written) {
            if (is_written && throw_at_write_ > 0 && --throw_at_write_ == 0) {
                throw std::bad_alloc();
            }
            is_written ? control_.host_writes(address, length) : control_.host_reads(address, length);
        };
        return settings;
    }

    // Like submitting and closing, by calls that may fail as all others may.
    Status open() {
        control_.exempt_thread(false);
        auto opened = CudaEngine::open(program_.api(), engine_settings(), pages_);
        control_.exempt_thread(true);
        if (!opened.ok()) {
            return opened.fault();
        }
        engine_ = std::move(opened.value());
        if (settings_.registered_bytes > 0) {
            add_slots(settings_.registered_bytes);
        }
        if (settings_.waits_for_registration) {
            wait_for_registration();
        }
        return {};
    }
    void register_slots(std::uint64_t length) {
        add_slots(length);
        wait_for_registration();
    }
    // All that with_room has registered.
    void remove_slots() {
        CHECK(engine_->remove_host_range(reinterpret_cast<std::uint64_t>(slots_.data()), settings_.registered_bytes)
                  .ok());
    }
    Status close(int timeout_ms) {
        control_.exempt_thread(false);
        Status status = engine_->close(timeout_ms);
        control_.exempt_thread(true);
        return status;
    }
    void drop_engine() { engine_.reset(); }
    // The engine's so-manieth write to host memory finds no memory.
    void throw_at_write(int count) { throw_at_write_ = count; }

    std::uint8_t* slot(std::uint32_t group, std::uint32_t block) {
        return slots_.data()->bytes + (group * kBlocks + block) * kSlotBytes;
    }
    ComputeStream compute() const { return reinterpret_cast<ComputeStream>(compute_); }
    std::uint64_t record_bytes(std::uint32_t group) const { return pages_.groups[group].record_bytes; }

    CopyPlan plan(CopyDirection direction, const std::vector<std::uint32_t>& blocks) {
        CopyPlan plan;
        plan.direction = direction;
        plan.has_digests = settings_.has_digests;
        for (std::uint32_t group = 0; group < 2; ++group) {
            for (const std::uint32_t block : blocks) {
                plan.items.push_back({group, block, reinterpret_cast<std::uint64_t>(slot(group, block))});
            }
        }
        return plan;
    }

    // After what the model has been given so far.
    Result<CopyTicket> try_submit(CopyDirection direction, const std::vector<std::uint32_t>& blocks) {
        control_.exempt_thread(false);
        Result<CopyTicket> ticket = engine_->submit(plan(direction, blocks), compute());
        control_.exempt_thread(true);
        return ticket;
    }
    CopyTicket submit(CopyDirection direction, const std::vector<std::uint32_t>& blocks) {
        Result<CopyTicket> ticket = engine_->submit(plan(direction, blocks), compute());
        CHECK(ticket.ok());
        return ticket.value();
    }

    // After `point`, and not after what the model has been given since.
    CopyTicket submit_after(CopyDirection direction, const std::vector<std::uint32_t>& blocks, SharedEvent point) {
        Result<CopyTicket> ticket = engine_->submit_after(plan(direction, blocks), std::move(point));
        CHECK(ticket.ok());
        return ticket.value();
    }
    SharedEvent mark() {
        Result<SharedEvent> point = engine_->mark(compute());
        CHECK(point.ok());
        return point.value();
    }

    // The model writes the pages of these blocks.
    void write_pages(const std::vector<std::uint32_t>& blocks, std::uint64_t pattern) {
        std::vector<fake::Bytes> writes;
        visit_runs(blocks, [&](const PageRun& run, std::uint32_t block) {
            writes.push_back({run.base + block * run.stride, run.length});
        });
        control_.launch_compute(compute_, {}, writes, pattern);
    }
    // The model reads them once the plan is through.
    void read_pages(const std::vector<std::uint32_t>& blocks, CopyTicket ticket) {
        CHECK(engine_->make_wait(compute(), ticket, kPatienceMs).ok());
        std::vector<fake::Bytes> reads;
        visit_runs(blocks, [&](const PageRun& run, std::uint32_t block) {
            reads.push_back({run.base + block * run.stride, run.length});
        });
        control_.launch_compute(compute_, reads, {}, 0);
    }

    // Returns the record of a block whose pages were filled by write_pages.
    std::vector<std::uint8_t> record_of(std::uint32_t group, std::uint64_t pattern) const {
        std::vector<std::uint8_t> record(record_bytes(group));
        for (const PageRun& run : pages_.groups[group].runs) {
            for (std::uint64_t at = 0; at < run.length; ++at) {
                record[run.record_offset + at] = fake::pattern_byte(pattern, at);
            }
        }
        return record;
    }
    bool slots_hold(const std::vector<std::uint32_t>& blocks, std::uint64_t pattern) {
        for (std::uint32_t group = 0; group < 2; ++group) {
            const auto expected = record_of(group, pattern);
            for (const std::uint32_t block : blocks) {
                control_.host_reads(slot(group, block), expected.size());
                if (!std::equal(expected.begin(), expected.end(), slot(group, block))) {
                    return false;
                }
            }
        }
        return true;
    }
    bool pages_hold(const std::vector<std::uint32_t>& blocks, std::uint64_t pattern) {
        bool holds = true;
        visit_runs(blocks, [&](const PageRun& run, std::uint32_t block) {
            std::vector<std::uint8_t> seen(run.length);
            control_.peek(run.base + block * run.stride, seen);
            for (std::uint64_t at = 0; at < run.length; ++at) {
                holds &= seen[at] == fake::pattern_byte(pattern, at);
            }
        });
        return holds;
    }
    void write_slots(const std::vector<std::uint32_t>& blocks, std::uint64_t pattern) {
        for (std::uint32_t group = 0; group < 2; ++group) {
            const auto record = record_of(group, pattern);
            for (const std::uint32_t block : blocks) {
                control_.host_writes(slot(group, block), record.size());
                std::ranges::copy(record, slot(group, block));
            }
        }
    }

    // Waits until the engine has reported `ticket` as finished.
    FinishedCopy wait_for(CopyTicket ticket) {
        for (Patience patience;; patience.wait()) {
            for (FinishedCopy& finished : engine_->poll()) {
                told_.push_back(std::move(finished));
            }
            control_.hear_others();
            const auto at = std::ranges::find(told_, ticket, &FinishedCopy::ticket);
            if (at != told_.end()) {
                FinishedCopy found = std::move(*at);
                told_.erase(at);
                return found;
            }
        }
    }
    void synchronize() { program_.synchronize(compute_); }

private:
    struct RunShape {
        std::uint64_t length;
        std::uint64_t stride;
    };

    void add_slots(std::uint64_t length) {
        CHECK(engine_->add_host_range(reinterpret_cast<std::uint64_t>(slots_.data()), length).ok());
    }
    void wait_for_registration() {
        for (Patience patience; !engine_->registration().is_done;) {
            patience.wait();
        }
    }
    void add_group(const std::vector<RunShape>& shapes) {
        GroupPages group;
        for (const RunShape& shape : shapes) {
            const CudaAddress base = program_.allocate_device(shape.stride * kBlocks + 16) + 3;
            group.runs.push_back({base, shape.stride, shape.length, group.record_bytes});
            group.record_bytes += shape.length;
        }
        pages_.groups.push_back(group);
    }
    template <typename Visit>
    void visit_runs(const std::vector<std::uint32_t>& blocks, Visit visit) {
        for (const GroupPages& group : pages_.groups) {
            for (const PageRun& run : group.runs) {
                for (const std::uint32_t block : blocks) {
                    visit(run, block);
                }
            }
        }
    }

    static constexpr std::uint64_t kSlotBytes = 768;

    const SceneSettings settings_;
    fake::Program program_;
    fake::Control& control_;
    PageTable pages_;
    CudaStream compute_ = nullptr;
    std::vector<HostPage> slots_ = std::vector<HostPage>(2 * kBlocks * kSlotBytes / sizeof(HostPage) + 1);
    std::unique_ptr<CudaEngine> engine_;
    std::vector<FinishedCopy> told_;
    std::atomic<int> throw_at_write_{0};
};

}  // namespace kvo::test
