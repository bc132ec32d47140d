#include "copy/copy_plan.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "copy/shared_blocks.hpp"
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

}  // namespace kvo
