// One of several memories that a trace is replayed over: the blocks that it holds, in the order of a policy. The caller
// decides which memory is asked for which blocks, and when; `replay` is the same with one memory and no time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "evict/eviction_policy.hpp"
#include "replay/replay_trace.hpp"

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

}  // namespace kvo
