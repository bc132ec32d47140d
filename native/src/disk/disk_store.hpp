// The disk tier: records by key on one or several devices, each with a thread of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "disk/device.hpp"
#include "disk/disk_batch.hpp"

namespace kvo {

struct StoreTerms {
    std::vector<DeviceTerms> devices;
    std::size_t batch_limit = 1024;                        // submitted and not yet polled
    std::uint64_t stripe_bytes = std::uint64_t{16} << 20;  // of one batch in a row on one device
};

struct ListedRecord {
    RecordKey key;
    Name32 parent{};
    std::uint64_t length = 0;
    std::uint64_t digest = 0;  // kNoDigest of a record that is sealed
};

// For any thread. Nothing waits for a device but `scan` and `close`, which have a bound. In a child of fork() it is the
// parent's: only the destructor may be called, and does nothing.
class DiskStore {
public:
    // Code::invalid: the terms cannot be kept. A folder that cannot be had is no fault here: `health` tells, and it is
    // tried again at intervals.
    static Result<std::unique_ptr<DiskStore>> create(StoreTerms terms);
    ~DiskStore();
    DiskStore(const DiskStore&) = delete;
    DiskStore& operator=(const DiskStore&) = delete;

    // Takes a batch with its items set; the caller keeps the memory until the batch has been polled, and no longer.
    // Consecutive records of a batch are written together. Code::unavailable: batch_limit are under way, or closed.
    Result<std::uint64_t> submit(const BatchPointer& batch);

    // Batches that have ended, or whose deadline is over, each told once.
    std::vector<BatchPointer> poll();

    // Readable when poll has something to tell, or may have.
    int file() const noexcept;

    // One byte a key: 1 if it is there.
    void contains(std::span<const RecordKey> keys, std::span<std::uint8_t> found);

    // The live records of the segments from `cursor` on (0: the first), up to the first that has any; and the cursor to
    // go on with, 0 at the end. Code::unavailable: the device did not answer in time.
    Result<std::uint64_t> scan(std::uint64_t cursor, std::vector<ListedRecord>& records, int timeout_ms);

    std::vector<DeviceHealth> health();

    // Waits until no device is opening any more. Returns false if one still is after the timeout.
    bool wait_open(int timeout_ms);

    // Ends what waits, writes what was taken, closes the folders. Code::failed: a device does not answer; its thread
    // and memory are left behind.
    Status close(int timeout_ms);

private:
    class Core;
    explicit DiskStore(std::unique_ptr<Core> core);

    std::unique_ptr<Core> core_;
};

}  // namespace kvo
