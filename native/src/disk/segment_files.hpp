// The files that a device's segments are in, and the room for them: the capacity, the file system's, and today's bytes.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_folder.hpp"
#include "disk/record_format.hpp"
#include "disk/record_index.hpp"
#include "io/io_queue.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// The segment files of a device and what each is used for.

enum class SegmentState : std::uint8_t {
    none,     // no file
    empty,    // a file without records
    writing,  // the open one, and those that are being sealed
    full,
    leaving,  // being evicted
};

struct SegmentFile {
    FileDescriptor file;
    SegmentState state = SegmentState::none;
    SegmentLife life;
    std::uint32_t readers = 0;   // wanted ranges of it that have not ended
    std::uint32_t removals = 0;  // records that say what is gone from older segments
    bool has_footer = false;
};

// The segments by number. For the device's thread.
using SegmentTable = std::vector<SegmentFile>;

// The device's index. Any thread may look records up; only the device's thread changes it.
struct SharedIndex {
    explicit SharedIndex(std::uint32_t segment_count) : index(segment_count) {}

    std::optional<RecordPlace> find(const KeyMark& mark) {
        const std::lock_guard hold(lock);
        return index.find(mark);
    }

    std::mutex lock;
    RecordIndex index;
};

// How many bytes a device may still be given today.
//
// A bucket that holds an hour's share and fills at 23 of 24 parts of the daily rate, so that no span of 24 hours sees
// more than a day's bytes. It begins full for a new folder and empty for an existing one, since the former server's
// writes are not known. So a restart does not get around the bound.
class WriteBudget {
public:
    WriteBudget(std::uint64_t daily_bytes, Instant now, bool is_new)  // 0: no bound
        : daily_bytes_(daily_bytes), left_(is_new ? hour() : 0.0), filled_(now) {}

    // Whether a record of so many bytes may be written now.
    bool allows(std::uint64_t bytes, Instant now) {
        fill(now);
        return daily_bytes_ == 0 || static_cast<double>(bytes) <= left_;
    }

    // Charges bytes that are written to the device, including footers and moved records. The balance may become
    // negative.
    void charge(std::uint64_t bytes) { left_ -= static_cast<double>(bytes); }

private:
    static constexpr double kHours = 24.0;

    double hour() const { return static_cast<double>(daily_bytes_) / kHours; }
    void fill(Instant now) {
        const double seconds = std::chrono::duration<double>(now - filled_).count();
        filled_ = now;
        left_ = std::min(hour(), left_ + seconds * hour() * (kHours - 1) / kHours / 3600.0);
    }

    std::uint64_t daily_bytes_;
    double left_;
    Instant filled_;
};

// For the device's thread. A call that takes a file or the folder waits for the file system.
class SegmentFiles {
public:
    // Both outlive it.
    SegmentFiles(const DeviceTerms& terms, DeviceCounts& counts);

    // Opens the folder, and none of its files. The store that is found first is the only one from then on.
    Status open();
    void close() { folder_.reset(); }

    Status check() const { return folder_->check(); }
    // Writes one block as a test. Where a full file system keeps a small store from writing, there must be room for a
    // segment, too.
    Status try_writing();

    Result<std::vector<std::uint32_t>> list() const { return folder_->list_segments(); }
    // Code::unavailable: the file is beyond the capacity, or not a whole one of ours.
    Status open_file(std::uint32_t number);
    Status remove_file(std::uint32_t number);

    SegmentTable& table() noexcept { return segments_; }
    SegmentFile& operator[](std::uint32_t number) { return segments_[number]; }
    std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(segments_.size()); }
    bool has_any(SegmentState state) const;
    std::uint64_t store() const noexcept { return store_; }
    std::uint64_t file_count() const noexcept { return file_count_; }

    // Segments without records, with files and without, as far as the file system has room for more.
    std::size_t empty_count() const;
    // One of these, with its file; `empty_count` is not 0. Code::unavailable: the file system is full, and segments are
    // evicted to make room. Code::failed: there are too few files for that, so their records stay.
    Result<std::uint32_t> find_empty();
    void begin_life(std::uint32_t number);
    void go_on_with_life(std::uint32_t number, const SegmentLife& life);
    // Asks the file system for another segment a while after it was full.
    void ask_for_room(Instant now);
    // One line if the file system has no room for all segments of the capacity, as far as is known; else empty.
    std::string shortage() const;

    // Charges bytes that are written to the device, including footers and probes.
    void spend(std::uint64_t bytes);
    bool may_spend(std::uint64_t bytes) { return budget_.allows(bytes, terms_.now()); }

private:
    // Whether new segments take the place of older ones before the capacity is reached.
    bool is_full() const noexcept { return !refusal_.empty() && file_count_ >= kLeastSegments; }
    Result<std::uint32_t> add_file();

    const DeviceTerms& terms_;
    DeviceCounts& counts_;
    SegmentTable segments_;
    WriteBudget budget_;
    std::optional<DiskFolder> folder_;
    std::uint64_t store_ = 0;  // once it is known no other is taken
    std::uint64_t generation_ = 0;
    std::uint64_t file_count_ = 0;
    Instant refused_at_;
    std::string refusal_;  // with which the file system gave no room for a segment that the capacity allows
};

}  // namespace kvo
