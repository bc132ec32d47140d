#include "disk/read_plan.hpp"

#include <algorithm>
#include <tuple>

#include "disk/record_format.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t round_down(std::uint64_t bytes) { return bytes / kIoAlignment * kIoAlignment; }

// One stretch of a segment, in pieces.
void cut(const std::vector<WantedRange>& ranges, std::size_t first, std::size_t last, const ReadPlanTerms& terms,
         std::vector<PlannedRead>& reads) {
    std::uint64_t end = 0;
    for (std::size_t i = first; i < last; ++i) {
        end = std::max(end, round_up(ranges[i].end, kIoAlignment));
    }
    std::size_t touched = first;
    for (std::uint64_t begin = round_down(ranges[first].begin); begin < end;) {
        const std::uint64_t piece_end = std::min(end, begin + terms.piece_bytes);
        while (touched < last && ranges[touched].end <= begin) {
            ++touched;
        }
        std::size_t behind = touched;
        while (behind < last && ranges[behind].begin < piece_end) {
            ++behind;
        }
        reads.push_back({ranges[first].segment, begin, piece_end, touched, behind});
        begin = piece_end;
    }
}

}  // namespace

std::vector<PlannedRead> plan_reads(std::vector<WantedRange>& ranges, const ReadPlanTerms& terms) {
    std::ranges::sort(ranges, {}, [](const WantedRange& one) { return std::tuple(one.segment, one.begin, one.item); });
    std::vector<PlannedRead> reads;
    std::size_t first = 0;
    std::uint64_t reached = 0;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
        const bool is_far = i > first && (ranges[i].segment != ranges[first].segment ||
                                          round_down(ranges[i].begin) > reached + terms.gap_bytes);
        if (is_far) {
            cut(ranges, first, i, terms, reads);
            first = i;
        }
        reached = i == first ? round_up(ranges[i].end, kIoAlignment)
                             : std::max(reached, round_up(ranges[i].end, kIoAlignment));
    }
    if (first < ranges.size()) {
        cut(ranges, first, ranges.size(), terms, reads);
    }
    return reads;
}

}  // namespace kvo
