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
    // Others go first where processors are short. Not as far as SCHED_IDLE: a thread that is kept waiting there would
    // keep the process's memory map locked, and with it everybody who maps something.
    bool is_background = false;
    std::size_t slice_bytes = std::size_t{32} << 20;
    std::uint64_t keep_free_bytes = 0;  // what must be left to others
    std::filesystem::path proc = "/proc";
};

// Shared with the threads that watch or cancel; of one or several segments, one after the other.
struct PopulateProgress {
    std::atomic<std::uint64_t> done_bytes = 0;
    std::atomic<bool> is_cancelled = false;  // set by anybody; heeded within one slice of each thread
};

struct SegmentRange {
    std::uint64_t offset = 0;
    std::uint64_t length = UINT64_MAX;  // at most; the segment's end bounds it
};

// Blocks until all pages of the range are there (about 0.5 s per GiB and thread), cancellation or a fault; no thread is
// left behind. What the segment holds survives. Refuses at once with Code::unavailable where the headroom is too small
// for what is missing, and on the way if others took it meanwhile; pages given till then stay until the segment goes.
// False: it was cancelled.
Result<bool> populate(Segment& segment, const PopulateTerms& terms, PopulateProgress& progress,
                      SegmentRange range = {});

}  // namespace kvo
