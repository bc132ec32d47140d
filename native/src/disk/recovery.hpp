// Finds the records of a segment file, however the process that wrote it ended.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "disk/record_format.hpp"

namespace kvo {

// Reads exactly these bytes, which are aligned; false: they cannot be had.
using ReadExactly = std::function<bool(std::uint64_t offset, std::span<std::byte> target)>;

struct FoundSegment {
    SegmentLife life;
    bool has_footer = false;
    bool is_whole = true;              // all of it could be read; the caller knows
    std::vector<FooterEntry> entries;  // ascending
};

// Reads the footer if it is whole; otherwise goes through the records and verifies each. Returns nothing if the file is
// not a segment of this store. Records that a footer lists are verified when they are read. Records that cannot be read
// are left out, and after 16 failed reads so is the rest of the file.
std::optional<FoundSegment> find_segment(const ReadExactly& read, std::uint64_t store, std::uint64_t segment_bytes,
                                         std::uint64_t record_limit_bytes);

// The footer's entries, if it is whole and of this life.
std::optional<std::vector<FooterEntry>> find_footer(const ReadExactly& read, const SegmentLife& life,
                                                    std::uint64_t segment_bytes);

}  // namespace kvo
