#include "copy/run_list.hpp"

#include <utility>

namespace kvo {
namespace {

constexpr std::uint64_t kSampleBytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kCutBytes = 4096;  // a page, and what the digest works on at once

// Where the block's first run lies. The rest of it follows in the order of the group's runs.
std::uint64_t first_address(const CopyItem& item, const PageTable& pages) {
    const std::vector<PageRun>& runs = pages.groups[item.group].runs;
    return runs.empty() ? 0 : runs.front().base + item.block * runs.front().stride;
}

}  // namespace

RunList::RunList(const CopyPlan& plan, const PageTable& pages) : plan_(&plan), pages_(&pages) {
    std::vector<std::pair<std::uint64_t, std::uint32_t>> items;
    items.reserve(plan.items.size());
    for (const CopyItem& item : plan.items) {
        items.emplace_back(first_address(item, pages), static_cast<std::uint32_t>(items.size()));
    }
    if (!std::ranges::is_sorted(items)) {
        std::ranges::sort(items);
    }
    order_.reserve(items.size());
    ends_.reserve(items.size());
    std::uint64_t end = 0;
    for (const auto& [address, number] : items) {
        end += pages.groups[plan.items[number].group].record_bytes;
        order_.push_back(number);
        ends_.push_back(end);
    }
}

std::uint64_t RunList::estimate_runs() const noexcept {
    std::uint64_t count = 0;
    const std::uint64_t end = end_part(0, kSampleBytes);
    visit_runs(0, end, [&](const CopyRun&) { ++count; });
    return end == 0 ? 0 : static_cast<std::uint64_t>(static_cast<unsigned __int128>(count) * total_bytes() / end);
}

std::uint64_t RunList::end_part(std::uint64_t begin, std::uint64_t size_bytes) const noexcept {
    if (begin >= total_bytes() || size_bytes >= total_bytes() - begin) {
        return total_bytes();
    }
    const std::uint64_t wanted = begin + std::max<std::uint64_t>(size_bytes, 1);
    const std::uint64_t record_at = begin_of(find_record(wanted));
    const std::uint64_t rounded = record_at + (wanted - record_at) / kCutBytes * kCutBytes;
    return rounded > begin ? rounded : wanted;
}

}  // namespace kvo
