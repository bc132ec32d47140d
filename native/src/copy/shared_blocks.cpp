#include "copy/shared_blocks.hpp"

#include <algorithm>
#include <utility>

namespace kvo {
namespace {

using Wide = __int128;

// Rounds down also below zero; the divisor is positive.
Wide divide(Wide number, Wide divisor) {
    const Wide quotient = number / divisor;
    return quotient * divisor > number ? quotient - 1 : quotient;
}

}  // namespace

SharedBlocks::SharedBlocks(const PageTable& pages) : group_count_(pages.groups.size()) {
    ranges_.resize(group_count_ * group_count_);
    for (std::size_t group = 0; group < group_count_; ++group) {
        for (std::size_t other = group + 1; other < group_count_; ++other) {
            std::vector<Range>& ranges = ranges_[group * group_count_ + other];
            ranges = find_ranges(pages.groups[group], pages.groups[other], pages.block_count);
            has_any_ = has_any_ || !ranges.empty();
        }
    }
}

bool SharedBlocks::is_shared(std::uint32_t block, std::uint32_t group, std::uint32_t other) const noexcept {
    const auto [low, high] = std::minmax(group, other);
    const std::vector<Range>& ranges = ranges_[low * group_count_ + high];
    const auto behind = std::ranges::upper_bound(ranges, std::uint64_t{block}, {}, &Range::first);
    return behind != ranges.begin() && block < (behind - 1)->end;
}

// Compares one run of each group: with equal strides they are as far apart in every block, so they meet in all or in
// none. Otherwise block by block the one with the larger stride comes from below, meets the other for a while and
// leaves it behind; for those blocks
//
//     far.base + block * far.stride < near.base + block * near.stride + near.length, and the other way round.
std::vector<SharedBlocks::Range> SharedBlocks::find_ranges(const GroupPages& group, const GroupPages& other,
                                                           std::uint64_t block_count) {
    std::vector<Range> ranges;
    for (const PageRun& one : group.runs) {
        for (const PageRun& two : other.runs) {
            const PageRun& far = one.stride > two.stride ? one : two;
            const PageRun& near = one.stride > two.stride ? two : one;
            const Wide gap = Wide{near.base} - far.base;
            const Wide steps = Wide{far.stride} - near.stride;
            if (steps == 0) {
                if (-Wide{near.length} < gap && gap < far.length && block_count > 0) {
                    return {{0, block_count}};
                }
                continue;
            }
            const Wide first = std::max<Wide>(divide(gap - far.length, steps) + 1, 0);
            const Wide end = std::min<Wide>(divide(gap + near.length - 1, steps) + 1, block_count);
            if (first < end) {
                ranges.push_back({static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(end)});
            }
        }
    }
    return merge(std::move(ranges));
}

// Ascending and apart.
std::vector<SharedBlocks::Range> SharedBlocks::merge(std::vector<Range> ranges) {
    std::ranges::sort(ranges, {}, &Range::first);
    std::vector<Range> merged;
    for (const Range& range : ranges) {
        if (merged.empty() || range.first > merged.back().end) {
            merged.push_back(range);
        } else {
            merged.back().end = std::max(merged.back().end, range.end);
        }
    }
    return merged;
}

}  // namespace kvo
