// Copy plans: blocks of an engine's cache that are copied to and from slots of host memory. Pure data; no engine is
// known here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.hpp"

namespace kvo {

// Where one run of any block of a group lies: at base + block * stride in the engine's memory, at record_offset in the
// block's record. Addresses are numbers because a device's cannot be read here.
struct PageRun {
    std::uint64_t base = 0;
    std::uint64_t stride = 0;
    std::uint64_t length = 0;
    std::uint64_t record_offset = 0;
    std::uint32_t allocation = 0;  // no copy crosses from one into another, even where they touch
};

// One group's pages, in record order. The runs make up the record without gaps.
struct GroupPages {
    std::uint64_t record_bytes = 0;
    std::vector<PageRun> runs;
};

// The pages that an engine has registered; groups by number. Blocks are counted from 0 to block_count - 1. The caller
// that describes the pages guarantees that blocks of different numbers share no byte; blocks of several groups with one
// number may.
struct PageTable {
    std::uint64_t block_count = 0;
    std::vector<GroupPages> groups;
};

// Code::invalid names the group and the run: a gap or an overlap in the record, a run of no bytes, blocks that lie on
// each other.
Status check_pages(const PageTable& pages);

enum class CopyDirection : std::uint8_t {
    save,  // from the engine's pages to slots
    load,  // from slots to the engine's pages
};

struct CopyItem {
    std::uint32_t group = 0;
    std::uint32_t block = 0;
    std::uint64_t slot = 0;  // address of the record in host memory
};

struct CopyPlan {
    CopyDirection direction = CopyDirection::save;
    bool has_digests = false;  // make the digest sum of each record on the way
    std::vector<CopyItem> items;
};

class SharedBlocks;

// Code::invalid: a group or block that does not exist, a slot that no memory can have, or a load that would write a
// byte twice: one block twice, or blocks of two groups that share bytes. `shared` is of these pages.
Status check_plan(const CopyPlan& plan, const PageTable& pages, const SharedBlocks& shared);

// Finds groups that have bytes in common: those of a pool whose blocks may be given to any of them.
//
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
