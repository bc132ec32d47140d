// Plans the large reads that fetch a batch of records: a pure function of where the records lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvo {

struct WantedRange {
    std::uint32_t segment = 0;
    std::uint64_t begin = 0;  // of the header
    std::uint64_t end = 0;    // of the record
    std::uint32_t item = 0;   // the caller's
};

struct PlannedRead {
    std::uint32_t segment = 0;
    std::uint64_t begin = 0;  // both aligned for O_DIRECT
    std::uint64_t end = 0;
    std::size_t first = 0;  // the ranges that it touches, in the order of the plan
    std::size_t last = 0;   // behind them
};

struct ReadPlanTerms {
    std::uint64_t gap_bytes = 0;    // gaps up to this length are read too, rather than split a read
    std::uint64_t piece_bytes = 0;  // no read is longer; a multiple of kIoAlignment
};

// Sorts the ranges; each of their bytes is in exactly one read.
std::vector<PlannedRead> plan_reads(std::vector<WantedRange>& ranges, const ReadPlanTerms& terms);

}  // namespace kvo
