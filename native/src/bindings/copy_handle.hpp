// A copy engine as Python holds it, whatever its kind, and the arrays that it is made and asked with.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "copy/copy_engine.hpp"

namespace kvo {

// Bytes of a record; of its runs: base, stride, length, offset in the record, allocation.
using GroupTuple =
    std::tuple<std::uint64_t, nanobind::object, nanobind::object, nanobind::object, nanobind::object, nanobind::object>;

template <typename Number>
std::vector<Number> read_numbers(nanobind::handle array, const char* name) {
    const BufferView buffer(array);
    const auto bytes = buffer.bytes();
    if (bytes.size() % sizeof(Number) != 0) {
        throw nanobind::value_error(
            (std::string(name) + " must be an array of numbers of " + std::to_string(sizeof(Number)) + " bytes")
                .c_str());
    }
    std::vector<Number> numbers(bytes.size() / sizeof(Number));
    if (!numbers.empty()) {
        std::memcpy(numbers.data(), bytes.data(), bytes.size());
    }
    return numbers;
}

inline PageTable table_of(std::uint64_t block_count, const std::vector<GroupTuple>& groups) {
    PageTable table{.block_count = block_count, .groups = {}};
    for (const auto& [record_bytes, bases, strides, lengths, offsets, allocations] : groups) {
        const auto base = read_numbers<std::uint64_t>(bases, "base");
        const auto stride = read_numbers<std::uint64_t>(strides, "stride");
        const auto length = read_numbers<std::uint64_t>(lengths, "length");
        const auto offset = read_numbers<std::uint64_t>(offsets, "record_offset");
        const auto allocation = read_numbers<std::uint32_t>(allocations, "allocation");
        if (stride.size() != base.size() || length.size() != base.size() || offset.size() != base.size() ||
            allocation.size() != base.size()) {
            throw nanobind::value_error("a group's arrays must have one number for each run");
        }
        GroupPages& pages = table.groups.emplace_back();
        pages.record_bytes = record_bytes;
        for (std::size_t i = 0; i < base.size(); ++i) {
            pages.runs.push_back({base[i], stride[i], length[i], offset[i], allocation[i]});
        }
    }
    return table;
}

inline CopyPlan make_plan(bool is_load, bool has_digests, nanobind::handle groups, nanobind::handle blocks,
                          nanobind::handle slots) {
    const auto group = read_numbers<std::uint32_t>(groups, "groups");
    const auto block = read_numbers<std::uint32_t>(blocks, "blocks");
    const auto slot = read_numbers<std::uint64_t>(slots, "slots");
    if (block.size() != group.size() || slot.size() != group.size()) {
        throw nanobind::value_error("groups, blocks and slots must have one number for each item");
    }
    CopyPlan plan{is_load ? CopyDirection::load : CopyDirection::save, has_digests, {}};
    plan.items.reserve(group.size());
    for (std::size_t i = 0; i < group.size(); ++i) {
        plan.items.push_back({group[i], block[i], slot[i]});
    }
    return plan;
}

inline constexpr int kLastWaitMs = 5000;

// An engine and the Python objects whose memory it copies from and to: they go when nothing can touch it any more.
class OwnedCopyEngine {
public:
    OwnedCopyEngine(std::unique_ptr<CopyEngine> engine, nanobind::object memory)
        : memory_(std::move(memory)), engine_(std::move(engine)) {}

    // Copies that still run keep their memory for good. A child of the engine's process leaves the threads and the
    // device to its parent.
    ~OwnedCopyEngine() {
        bool is_over = false;
        if (is_of_this_process()) {
            const WithoutGil unlocked;
            try {
                is_over = engine_->close(kLastWaitMs).ok();
            } catch (const std::bad_alloc&) {
                is_over = false;
            }
            engine_.reset();
        } else {
            static_cast<void>(engine_.release());
            is_over = true;
        }
        if (!is_over) {
            static_cast<void>(memory_.release());
        }
    }
    OwnedCopyEngine(const OwnedCopyEngine&) = delete;
    OwnedCopyEngine& operator=(const OwnedCopyEngine&) = delete;

    CopyTicket submit(bool is_load, bool has_digests, nanobind::handle groups, nanobind::handle blocks,
                      nanobind::handle slots, std::optional<ComputeStream> after) {
        check_process();
        CopyPlan plan = make_plan(is_load, has_digests, groups, blocks, slots);
        const auto submitted = [&] {
            const WithoutGil unlocked;
            return engine_->submit(std::move(plan), after);
        };
        return take(submitted());
    }

    // By plan: ticket, what failed or None, the digests' two halves one after the other or None, and the nanoseconds
    // that it was copied for.
    nanobind::list poll() {
        check_process();
        nanobind::list finished;
        for (const FinishedCopy& one : engine_->poll()) {
            const bool is_ok = one.status.ok();
            finished.append(nanobind::make_tuple(
                one.ticket, is_ok ? nanobind::none() : nanobind::object(nanobind::str(one.status.message().c_str())),
                one.digests.empty() ? nanobind::none() : nanobind::object(to_bytes(one.digests)), one.copied.count()));
        }
        return finished;
    }

    bool fence(int timeout_ms) {
        check_process();
        const WithoutGil unlocked;
        return engine_->fence(timeout_ms);
    }

    // If a child of the engine's process calls this, only its own hold on the memory goes.
    void close(int timeout_ms) {
        Status status;
        if (is_of_this_process()) {
            const WithoutGil unlocked;
            status = engine_->close(timeout_ms);
        }
        raise_if_not_ok(status);
        memory_.reset();
    }

protected:
    CopyEngine& copy_engine() noexcept { return *engine_; }

    void check_process() const {
        if (!is_of_this_process()) {
            nanobind::raise("the copy engine belongs to the process that made it, and this is a child of it");
        }
    }

private:
    bool is_of_this_process() const noexcept { return getpid() == process_; }

    nanobind::object memory_;
    std::unique_ptr<CopyEngine> engine_;
    const pid_t process_ = getpid();
};

}  // namespace kvo
