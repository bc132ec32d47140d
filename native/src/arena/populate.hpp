// Giving a segment its memory before it is used, by several threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "arena/segment.hpp"
#include "base/status.hpp"

namespace kvo {

struct PopulateTerms {
    unsigned threads = 1;  // fewer are used if the system has no more
    // Gives other threads priority when processors are short. It does not use SCHED_IDLE: a thread that is kept waiting
    // there would keep the process's memory map locked, and so block every thread that maps something.
    bool is_background = false;
    std::size_t slice_bytes = std::size_t{32} << 20;
    std::uint64_t keep_free_bytes = 0;  // memory that must be left to other processes
    std::filesystem::path proc = "/proc";
};

// Shared with the threads that watch or cancel; of one or several segments, one after the other.
struct PopulateProgress {
    std::atomic<std::uint64_t> done_bytes = 0;
    std::atomic<bool> is_cancelled = false;  // any thread may set it; each working thread then ends after its slice
};

struct SegmentRange {
    std::uint64_t offset = 0;
    std::uint64_t length = UINT64_MAX;  // at most; the segment's end bounds it
};

// Blocks until all pages of the range are there (about 0.5 s per GiB and thread), until it is cancelled, or until a
// fault; leaves no thread behind. Keeps the segment's contents. Fails with Code::unavailable, at once if the headroom
// is too small for the missing pages, or later if other processes took the memory meanwhile; pages given until then
// stay as long as the segment. Returns false if it was cancelled.
Result<bool> populate(Segment& segment, const PopulateTerms& terms, PopulateProgress& progress,
                      SegmentRange range = {});

}  // namespace kvo
