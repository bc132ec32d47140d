// One of several memories that a trace is replayed over: the blocks that it holds, in the order of a policy. The caller
// decides which memory is asked for which blocks, and when; `replay` is the same with one memory and no time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.hpp"
#include "evict/eviction_policy.hpp"
#include "replay/replay.hpp"

namespace kvo {

struct ReplayAdmission {
    std::uint64_t admitted = 0;
    std::uint64_t evicted = 0;
    std::uint64_t refused = 0;  // did not fit next to those that are held
};

// Full attention alone: every block has one record, of one unit. One thread.
class ReplayMemory {
public:
    using Blocks = std::span<const BlockNumber>;

    // `policy` is new, for the bounds of this capacity. `trace` outlives this and does not grow meanwhile.
    ReplayMemory(const ReplayTrace& trace, std::uint64_t capacity_blocks, std::unique_ptr<EvictionPolicy> policy);

    std::uint64_t used_blocks() const noexcept { return entries_.size() - free_.size(); }
    bool holds(BlockNumber block) const noexcept { return residents_[block] != kNoEntry; }
    // Number of blocks that are here without a gap, from the first one on.
    std::size_t count_prefix(Blocks blocks) const noexcept;
    // Notes that one request uses these blocks, in its order. Blocks that are not here are skipped.
    void touch(Blocks blocks);
    // Makes room for those of `blocks` that are not here, parents first, and takes them in, as far as they fit next to
    // those of `held`, which stay. Code::failed: the policy broke its contract.
    Result<ReplayAdmission> admit(Blocks blocks, Blocks held);

private:
    struct Resident {
        BlockNumber block = kNoBlock;
        std::uint32_t held_by = 0;  // the last call of `admit` that did, counted from 1
    };

    Status evict_until_free(std::uint64_t count, ReplayAdmission& made);
    void take_in(BlockNumber block);

    const ReplayTrace& trace_;
    const std::uint64_t capacity_blocks_;
    const std::unique_ptr<EvictionPolicy> policy_;
    std::vector<EntryNumber> residents_;  // by block
    std::vector<Resident> entries_;       // by entry number
    std::vector<EntryNumber> free_;
    std::vector<EntryNumber> touched_;  // of the running call
    std::vector<BlockNumber> missing_;  // of the running call
    std::uint32_t call_ = 0;
};

// A pool of records of several groups, which a policy keeps in order. The caller decides which records are asked for,
// and when; `replay` is the same with a trace and no time, `ReplayMemory` with blocks of one size.

// A block's record in a group. The same block has the same name in all groups; no block has the name 0.
struct PoolRecord {
    std::uint32_t group = 0;
    std::uint64_t name = 0;
    bool operator==(const PoolRecord&) const = default;
};

// One thread. Groups may come in any order, and need no prefix group.
class ReplayPool {
public:
    using Records = std::span<const PoolRecord>;

    // `policy` is new, for `replay_bounds` of this shape and capacity.
    ReplayPool(ReplayShape shape, std::uint64_t capacity_bytes, std::unique_ptr<EvictionPolicy> policy);

    std::size_t group_count() const noexcept { return shape_.size(); }
    std::uint64_t used_bytes() const noexcept { return used_bytes_; }
    bool holds(PoolRecord record) const { return numbers_.contains(record); }
    // Notes that one request uses these records, in its order. Records that are not here are skipped.
    void touch(Records records);
    // Makes room for those that are not here, parents first, and takes them in, as far as they fit. `parents` are the
    // names of the blocks before them, or, of windows and states, unused. Code::failed: the policy broke its contract.
    Result<ReplayAdmission> admit(Records records, std::span<const std::uint64_t> parents);

private:
    struct RecordHash {
        std::size_t operator()(const PoolRecord& record) const noexcept;
    };

    Status evict_until_free(std::uint64_t size_bytes, ReplayAdmission& made);
    void take_in(PoolRecord record, std::uint64_t parent);
    EntryNumber find(std::uint32_t group, std::uint64_t name) const;

    const ReplayShape shape_;
    const std::uint64_t capacity_bytes_;
    const std::unique_ptr<EvictionPolicy> policy_;
    std::uint32_t first_prefix_ = 0;  // as many as there are groups: none
    bool has_states_ = false;
    std::uint64_t used_bytes_ = 0;
    std::unordered_map<PoolRecord, EntryNumber, RecordHash> numbers_;
    std::vector<PoolRecord> entries_;  // by entry number; a name of 0: free
    std::vector<EntryNumber> free_;
    std::vector<EntryNumber> touched_;  // of the running call
};

}  // namespace kvo
