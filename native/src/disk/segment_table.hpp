// The segment files of a device and what each is used for.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "disk/record_format.hpp"
#include "disk/record_index.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

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

}  // namespace kvo
