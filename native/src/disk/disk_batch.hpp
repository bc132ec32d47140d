// Records that are asked for or given together, and what became of each.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "disk/record_format.hpp"
#include "io/io_queue.hpp"

namespace kvo {

enum class DiskVerb : std::uint8_t { put, get, remove };

enum class DiskOutcome : std::uint8_t {
    waiting,
    touched,  // waiting, while a thread of the tier copies from or to the record's memory
    // Ends, in the order of docs/disk.md; Python has the same numbers.
    written,      // put: survives the process, however it ends
    durable,      // put: survives the machine's loss of power, as far as fdatasync does
    found,        // get: the bytes are there and have their digest
    missing,      // get, remove: no such record here
    removed,      // remove
    damaged,      // put: the bytes do not have their digest. get: nor have those on disk; the record is gone
    late,         // the deadline
    over_budget,  // put: today's bytes are written
    too_large,    // put: no segment or no buffer takes such a record
    unavailable,  // no device can do it now: `health` says why
    failed,       // the device tried and could not
};

constexpr bool is_end(DiskOutcome outcome) { return outcome > DiskOutcome::touched; }

struct DiskItem {
    RecordKey key;
    Name32 parent{};               // put: kept with the record. get: the one that was kept
    std::byte* address = nullptr;  // of the record's bytes; only the thread that claimed the item may touch them
    std::uint64_t length = 0;
    std::uint64_t digest = 0;  // put: that the bytes must have. get: that they have
    std::atomic<DiskOutcome> outcome = DiskOutcome::waiting;
};

// Shared by who asked and the devices' threads. Each item ends once; the thread that ends the last one calls `on_end`.
class DiskBatch {
public:
    DiskBatch(DiskVerb what, std::size_t count, Instant until)
        : verb(what), deadline(until), items_(std::make_unique<DiskItem[]>(count)), count_(count), open_(count) {}

    const DiskVerb verb;
    const Instant deadline;
    bool wants_durable = false;
    bool is_move = false;  // of the device's own: no budget, and a record that is there is written again
    std::uint64_t ticket = 0;
    std::function<void()> on_end;  // set before the batch is shared

    std::size_t size() const noexcept { return count_; }
    DiskItem& item(std::size_t number) const { return items_[number]; }
    bool has_ended() const noexcept { return open_.load() == 0; }

    // Takes the right to touch the item's memory until `release` or `end`. Returns false if the item has ended.
    bool claim(std::size_t number) {
        DiskOutcome expected = DiskOutcome::waiting;
        return items_[number].outcome.compare_exchange_strong(expected, DiskOutcome::touched);
    }
    void release(std::size_t number) { items_[number].outcome = DiskOutcome::waiting; }

    // Ends an item, claimed or not. Only the device's thread calls it. Has no effect on an item that has ended.
    void end(std::size_t number, DiskOutcome outcome) {
        DiskOutcome seen = items_[number].outcome;
        while (!is_end(seen)) {
            if (items_[number].outcome.compare_exchange_weak(seen, outcome)) {
                count_down();
                return;
            }
        }
    }

    // Ends all waiting items as late. Any thread may call it. Items whose memory is being copied do not end yet: call
    // it again.
    void expire() {
        for (std::size_t i = 0; i < count_; ++i) {
            DiskOutcome expected = DiskOutcome::waiting;
            if (items_[i].outcome.compare_exchange_strong(expected, DiskOutcome::late)) {
                count_down();
            }
        }
    }

private:
    void count_down() {
        if (open_.fetch_sub(1) == 1 && on_end) {
            on_end();
        }
    }

    const std::unique_ptr<DiskItem[]> items_;
    const std::size_t count_;
    std::atomic<std::size_t> open_;
};

using BatchPointer = std::shared_ptr<DiskBatch>;

// Items of a batch that are one device's.
struct DevicePart {
    BatchPointer batch;
    std::vector<std::uint32_t> items;
};

}  // namespace kvo
