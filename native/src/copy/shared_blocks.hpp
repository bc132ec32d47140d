// Finds groups that have bytes in common: those of a pool whose blocks may be given to any of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/copy_plan.hpp"

namespace kvo {

// Immutable, so any number of threads may read it.
class SharedBlocks {
public:
    // Compares the runs of each group with those of every other: once for an engine, not for each plan. The pages have
    // passed their check. Throws std::bad_alloc.
    explicit SharedBlocks(const PageTable& pages);

    bool has_any() const noexcept { return has_any_; }

    // Whether block number `block` has a byte that is in both groups. False for a group and itself.
    bool is_shared(std::uint32_t block, std::uint32_t group, std::uint32_t other) const noexcept;

private:
    // Blocks from `first` to the one before `end`.
    struct Range {
        std::uint64_t first = 0;
        std::uint64_t end = 0;
    };

    static std::vector<Range> find_ranges(const GroupPages& group, const GroupPages& other, std::uint64_t block_count);
    static std::vector<Range> merge(std::vector<Range> ranges);

    std::size_t group_count_;
    std::vector<std::vector<Range>> ranges_;  // ascending; of two groups at lower * group_count_ + higher
    bool has_any_ = false;
};

}  // namespace kvo
