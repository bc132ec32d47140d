#include "replay/replay_memory.hpp"

#include <string>

namespace kvo {

ReplayMemory::ReplayMemory(const ReplayTrace& trace, std::uint64_t capacity_blocks,
                           std::unique_ptr<EvictionPolicy> policy)
    : trace_(trace),
      capacity_blocks_(capacity_blocks),
      policy_(std::move(policy)),
      residents_(trace.block_count(), kNoEntry) {}

std::size_t ReplayMemory::count_prefix(Blocks blocks) const noexcept {
    std::size_t count = 0;
    while (count < blocks.size() && holds(blocks[count])) {
        ++count;
    }
    return count;
}

void ReplayMemory::touch(Blocks blocks) {
    touched_.clear();
    for (const BlockNumber block : blocks) {
        if (holds(block)) {
            touched_.push_back(residents_[block]);
        }
    }
    if (!touched_.empty()) {
        policy_->touch(touched_);
    }
}

Result<ReplayAdmission> ReplayMemory::admit(Blocks blocks, Blocks held) {
    ReplayAdmission made;
    call_ += 1;
    std::uint64_t held_count = 0;
    for (const BlockNumber block : held) {
        if (holds(block) && entries_[residents_[block]].held_by != call_) {
            entries_[residents_[block]].held_by = call_;
            held_count += 1;
        }
    }
    missing_.clear();
    for (const BlockNumber block : blocks) {
        if (holds(block)) {
            continue;
        }
        if (held_count + missing_.size() < capacity_blocks_) {
            missing_.push_back(block);
        } else {
            made.refused += 1;
        }
    }
    if (Status status = evict_until_free(missing_.size(), made); !status.ok()) {
        return status;
    }
    for (const BlockNumber block : missing_) {
        if (!holds(block)) {
            take_in(block);
            made.admitted += 1;
        }
    }
    return made;
}

Status ReplayMemory::evict_until_free(std::uint64_t count, ReplayAdmission& made) {
    // A policy that was told to keep each entry twice and still offers held ones never offers another.
    std::uint64_t keeps_left = 2 * used_blocks();
    while (used_blocks() + count > capacity_blocks_) {
        const EntryNumber victim = policy_->choose_victim();
        if (victim >= entries_.size() || entries_[victim].block == kNoBlock) {
            return {Code::failed, "the policy chose " + std::to_string(victim) + ", which is not here"};
        }
        if (entries_[victim].held_by == call_) {
            if (keeps_left-- == 0) {
                return {Code::failed, "the policy chose held entries only"};
            }
            policy_->keep(victim);
            continue;
        }
        policy_->remove(victim, true);
        residents_[entries_[victim].block] = kNoEntry;
        entries_[victim].block = kNoBlock;
        free_.push_back(victim);
        made.evicted += 1;
    }
    return {};
}

void ReplayMemory::take_in(BlockNumber block) {
    if (free_.empty()) {
        free_.push_back(static_cast<EntryNumber>(entries_.size()));
        entries_.emplace_back();
    }
    const EntryNumber entry = free_.back();
    free_.pop_back();
    entries_[entry] = {block, call_};
    residents_[block] = entry;
    const BlockNumber before = trace_.parent(block);
    Admission admission;
    admission.entry = entry;
    admission.parent = before == kNoBlock ? kNoEntry : residents_[before];
    admission.name = spread_bits(block);
    admission.size_bytes = 1;
    policy_->admit(admission);
}

}  // namespace kvo
