#include "replay/replay_memory.hpp"

#include <algorithm>
#include <string>
#include <utility>

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

ReplayPool::ReplayPool(ReplayShape shape, std::uint64_t capacity_bytes, std::unique_ptr<EvictionPolicy> policy)
    : shape_(std::move(shape)), capacity_bytes_(capacity_bytes), policy_(std::move(policy)) {
    const auto prefix = std::ranges::find(shape_, Reuse::prefix, &ReplayGroup::reuse);
    first_prefix_ = static_cast<std::uint32_t>(prefix - shape_.begin());
    has_states_ = std::ranges::find(shape_, Reuse::exact, &ReplayGroup::reuse) != shape_.end();
}

std::size_t ReplayPool::RecordHash::operator()(const PoolRecord& record) const noexcept {
    return static_cast<std::size_t>(spread_bits(record.name ^ (std::uint64_t{record.group} << 56)));
}

EntryNumber ReplayPool::find(std::uint32_t group, std::uint64_t name) const {
    const auto found = numbers_.find({group, name});
    return found == numbers_.end() ? kNoEntry : found->second;
}

void ReplayPool::touch(Records records) {
    touched_.clear();
    for (const PoolRecord& record : records) {
        if (const EntryNumber entry = find(record.group, record.name); entry != kNoEntry) {
            touched_.push_back(entry);
        }
    }
    if (!touched_.empty()) {
        policy_->touch(touched_);
    }
}

Result<ReplayAdmission> ReplayPool::admit(Records records, std::span<const std::uint64_t> parents) {
    ReplayAdmission made;
    std::uint64_t size_bytes = 0;
    std::size_t count = 0;
    while (count < records.size()) {
        const EntryNumber present = find(records[count].group, records[count].name);
        const std::uint64_t more = present != kNoEntry ? 0 : shape_[records[count].group].size_bytes;
        if (size_bytes + more > capacity_bytes_) {
            break;
        }
        if (present != kNoEntry) {
            policy_->spare(present);
        }
        size_bytes += more;
        count += 1;
    }
    made.refused = records.size() - count;
    if (Status status = evict_until_free(size_bytes, made); !status.ok()) {
        return status;
    }
    for (std::size_t at = 0; at < count; ++at) {
        if (!holds(records[at]) && used_bytes_ + shape_[records[at].group].size_bytes <= capacity_bytes_) {
            take_in(records[at], parents[at]);
            made.admitted += 1;
        }
    }
    return made;
}

Status ReplayPool::evict_until_free(std::uint64_t size_bytes, ReplayAdmission& made) {
    while (used_bytes_ + size_bytes > capacity_bytes_) {
        const EntryNumber victim = policy_->choose_victim();
        if (victim >= entries_.size() || entries_[victim].name == 0) {
            return {Code::failed, "the policy chose " + std::to_string(victim) + ", which is not here"};
        }
        policy_->remove(victim, true);
        used_bytes_ -= shape_[entries_[victim].group].size_bytes;
        numbers_.erase(entries_[victim]);
        entries_[victim].name = 0;
        free_.push_back(victim);
        made.evicted += 1;
    }
    return {};
}

void ReplayPool::take_in(PoolRecord record, std::uint64_t parent) {
    if (free_.empty()) {
        free_.push_back(static_cast<EntryNumber>(entries_.size()));
        entries_.emplace_back();
    }
    const EntryNumber entry = free_.back();
    free_.pop_back();
    const ReplayGroup& group = shape_[record.group];
    const bool is_prefix = group.reuse == Reuse::prefix;
    Admission admission;
    admission.entry = entry;
    admission.parent = is_prefix ? find(record.group, parent) : find(first_prefix_, record.name);
    admission.name = spread_bits(record.name ^ (std::uint64_t{record.group} << 56));
    admission.size_bytes = group.size_bytes;
    admission.reuse = group.reuse;
    admission.needs_state = is_prefix && has_states_;
    admission.window_blocks = group.window_blocks;
    admission.group = record.group;
    entries_[entry] = record;
    numbers_[record] = entry;
    used_bytes_ += group.size_bytes;
    policy_->admit(admission);
}

}  // namespace kvo
