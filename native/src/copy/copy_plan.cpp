#include "copy/copy_plan.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "digest/digest.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t kLastAddress = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kMaxPlanBytes = std::uint64_t{1} << 63;
constexpr std::uint64_t kMaxItems = std::numeric_limits<std::uint32_t>::max();

Status invalid(std::string message) { return {Code::invalid, std::move(message)}; }

std::string name_run(std::size_t group, std::size_t run) {
    return "group " + std::to_string(group) + ", run " + std::to_string(run);
}

std::string name_item(const CopyItem& item) {
    return "block " + std::to_string(item.block) + " of group " + std::to_string(item.group);
}

// Whether the last byte of the last block has an address at all.
bool has_addresses(const PageRun& run, std::uint64_t block_count) {
    const auto last_block = static_cast<unsigned __int128>(std::max<std::uint64_t>(block_count, 1) - 1);
    return run.base + last_block * run.stride + run.length - 1 <= kLastAddress;
}

Status check_group(const GroupPages& pages, std::size_t group, std::uint64_t block_count) {
    std::uint64_t expected = 0;
    for (std::size_t i = 0; i < pages.runs.size(); ++i) {
        const PageRun& run = pages.runs[i];
        if (run.length == 0) {
            return invalid(name_run(group, i) + " has no bytes");
        }
        if (run.record_offset != expected) {
            return invalid(name_run(group, i) + " begins at byte " + std::to_string(run.record_offset) +
                           " of the record, the runs before it end at " + std::to_string(expected));
        }
        if (run.length > kMaxRecordBytes - expected) {
            return invalid(name_run(group, i) + ": a record must not be longer than 2**63 bytes");
        }
        if (run.stride < run.length && block_count > 1) {
            return invalid(name_run(group, i) + ": its blocks have " + std::to_string(run.length) + " bytes and are " +
                           std::to_string(run.stride) + " bytes apart");
        }
        if (!has_addresses(run, block_count)) {
            return invalid(name_run(group, i) + ": block " + std::to_string(block_count - 1) +
                           " lies beyond all addresses");
        }
        expected += run.length;
    }
    if (expected != pages.record_bytes) {
        return invalid("group " + std::to_string(group) + ": its runs have " + std::to_string(expected) +
                       " bytes, its record " + std::to_string(pages.record_bytes));
    }
    return {};
}

Status check_items(const CopyPlan& plan, const PageTable& pages) {
    if (plan.items.size() > kMaxItems) {
        return invalid("a plan must not have more than 2**32 - 1 items");
    }
    std::uint64_t plan_bytes = 0;
    for (const CopyItem& item : plan.items) {
        if (item.group >= pages.groups.size()) {
            return invalid("group " + std::to_string(item.group) + " is not one of the " +
                           std::to_string(pages.groups.size()) + " registered");
        }
        if (item.block >= pages.block_count) {
            return invalid(name_item(item) + " is not one of the " + std::to_string(pages.block_count) + " there are");
        }
        const std::uint64_t record_bytes = pages.groups[item.group].record_bytes;
        if ((item.slot == 0 && record_bytes > 0) || record_bytes > kLastAddress - item.slot) {
            return invalid(name_item(item) + ": its slot is at no possible address (" + std::to_string(item.slot) +
                           ")");
        }
        if (record_bytes > kMaxPlanBytes - plan_bytes) {
            return invalid("a plan must not copy more than 2**63 bytes");
        }
        plan_bytes += record_bytes;
    }
    return {};
}

// Checked for loads only: two threads would write one byte at once, and the result would be undefined.
Status check_written_once(const CopyPlan& plan, const SharedBlocks& shared) {
    std::vector<std::uint64_t> blocks;  // number and group, so that the groups of one number stand side by side
    blocks.reserve(plan.items.size());
    for (const CopyItem& item : plan.items) {
        blocks.push_back(std::uint64_t{item.block} << 32 | item.group);
    }
    if (!std::ranges::is_sorted(blocks)) {
        std::ranges::sort(blocks);
    }
    const auto number_of = [&](std::size_t i) { return static_cast<std::uint32_t>(blocks[i] >> 32); };
    const auto group_of = [&](std::size_t i) { return static_cast<std::uint32_t>(blocks[i]); };
    for (std::size_t i = 1; i < blocks.size(); ++i) {
        if (blocks[i] == blocks[i - 1]) {
            return invalid(name_item({group_of(i), number_of(i), 0}) + " is loaded twice in one plan");
        }
        for (std::size_t j = i; shared.has_any() && j > 0 && number_of(j - 1) == number_of(i); --j) {
            if (shared.is_shared(number_of(i), group_of(i), group_of(j - 1))) {
                return invalid(name_item({group_of(i), number_of(i), 0}) + " shares bytes with that of group " +
                               std::to_string(group_of(j - 1)) + ", which is loaded in the same plan");
            }
        }
    }
    return {};
}

}  // namespace

Status check_pages(const PageTable& pages) {
    for (std::size_t group = 0; group < pages.groups.size(); ++group) {
        if (Status status = check_group(pages.groups[group], group, pages.block_count); !status.ok()) {
            return status;
        }
    }
    return {};
}

Status check_plan(const CopyPlan& plan, const PageTable& pages, const SharedBlocks& shared) {
    Status status = check_items(plan, pages);
    if (status.ok() && plan.direction == CopyDirection::load) {
        status = check_written_once(plan, shared);
    }
    return status;
}

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
