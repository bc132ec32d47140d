// Giving a whole segment its memory before it is used, by several threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "arena/segment.hpp"
#include "base/status.hpp"

namespace kvo {

struct PopulateTerms {
    unsigned threads = 1;  // the calling one included; fewer are used if the system has no more
    std::size_t slice_bytes = std::size_t{32} << 20;
    std::uint64_t keep_free_bytes = 0;  // what must be left to others
    std::filesystem::path proc = "/proc";
};

// Shared with the threads that watch or cancel; of one or several segments, one after the other.
struct PopulateProgress {
    std::atomic<std::uint64_t> done_bytes = 0;
    std::atomic<bool> is_cancelled = false;  // set by anybody; heeded within one slice of each thread
};

struct Populated {
    bool is_complete = false;  // false: cancelled
    std::uint64_t huge_bytes = 0;
};

// Blocks until all pages are there (about 0.5 s per GiB and thread), cancellation or a fault; no thread is left behind.
// What the segment holds survives. Refuses at once with Code::unavailable where the headroom is too small for what is
// missing, and on the way if others took it meanwhile; pages given till then stay until the segment goes.
Result<Populated> populate(Segment& segment, const PopulateTerms& terms, PopulateProgress& progress);

}  // namespace kvo
