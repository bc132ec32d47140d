// The files that a device's segments are in, and the room for them: the capacity, the file system's, and today's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/status.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_folder.hpp"
#include "disk/segment_table.hpp"
#include "disk/write_budget.hpp"

namespace kvo {

// For the device's thread. A call that takes a file or the folder waits for the file system.
class SegmentFiles {
public:
    // Both outlive it.
    SegmentFiles(const DeviceTerms& terms, DeviceCounts& counts);

    // Opens the folder, and none of its files. The store that is found first is the only one from then on.
    Status open();
    void close() { folder_.reset(); }

    Status check() const { return folder_->check(); }
    // A block more, to see whether that works. Room is asked for again behind it.
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
    // One of these, with its file; `empty_count` is not 0. Code::unavailable: the file system is full, and there are
    // segments to evict.
    Result<std::uint32_t> find_empty();
    void begin_life(std::uint32_t number);
    void go_on_with_life(std::uint32_t number, const SegmentLife& life);
    // Somebody may have made room since the file system had none.
    void expect_room(Instant now);

    // What goes to the device, footers and probes too.
    void spend(std::uint64_t bytes);
    bool may_spend(std::uint64_t bytes) { return budget_.allows(bytes, terms_.now()); }

private:
    const DeviceTerms& terms_;
    DeviceCounts& counts_;
    SegmentTable segments_;
    WriteBudget budget_;
    std::optional<DiskFolder> folder_;
    std::uint64_t store_ = 0;  // once it is known no other is taken
    std::uint64_t generation_ = 0;
    std::uint64_t file_count_ = 0;
    Instant full_since_;
    bool is_full_ = false;  // the file system gave no room for a segment that the capacity allows
};

}  // namespace kvo
