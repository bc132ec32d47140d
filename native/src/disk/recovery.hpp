// What a segment file holds, found after any end of the process that wrote it.
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

// By the footer if it is whole, else by going through the records, each of which is verified. None: no segment of this
// store. What a footer speaks of is verified when it is read. What cannot be read is left out, and after 16 failed
// reads all that is behind.
std::optional<FoundSegment> find_segment(const ReadExactly& read, std::uint64_t store, std::uint64_t segment_bytes,
                                         std::uint64_t record_limit_bytes);

// The footer's entries, if it is whole and of this life.
std::optional<std::vector<FooterEntry>> find_footer(const ReadExactly& read, const SegmentLife& life,
                                                    std::uint64_t segment_bytes);

}  // namespace kvo
