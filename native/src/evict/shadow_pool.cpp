#include "evict/shadow_pool.hpp"

#include <utility>

namespace kvo {
namespace {

constexpr std::size_t kFewestCells = 64;

}  // namespace

ShadowPool::ShadowPool(const MakePolicy& make_policy, PolicyBounds bounds)
    : bounds_(bounds), policy_(make_policy(bounds)), cells_(kFewestCells, kNoEntry) {}

void ShadowPool::begin_request() {
    tell_uses();
    request_ += request_ + 1 == 0 ? 2 : 1;  // 0 is none
    // A policy offers each entry once before it offers one for the third time.
    keeps_left_ = 2 * count();
}

bool ShadowPool::use(const ShadowRecord& record) {
    const EntryNumber entry = find(record.name);
    if (entry == kNoEntry) {
        admit(record, false);
        return false;
    }
    Resident& resident = residents_[entry];
    resident.request = request_;
    used_.push_back(entry);
    return !std::exchange(resident.is_for_use, false);
}

void ShadowPool::bring(const ShadowRecord& record, bool for_use) {
    if (!holds(record.name)) {
        admit(record, for_use);
    }
}

void ShadowPool::remove(std::uint64_t name) {
    if (const EntryNumber entry = find(name); entry != kNoEntry) {
        tell_uses();
        forget(entry, false);
    }
}

// Takes the high bits, since the names of one space may be alike in all others.
std::size_t ShadowPool::cell_of(std::uint64_t name) const noexcept {
    return static_cast<std::size_t>((name * 0x9e3779b97f4a7c15) >> 32) & (cells_.size() - 1);
}

EntryNumber ShadowPool::find(std::uint64_t name) const noexcept {
    for (std::size_t cell = cell_of(name);; cell = (cell + 1) & (cells_.size() - 1)) {
        if (cells_[cell] == kNoEntry || residents_[cells_[cell]].name == name) {
            return cells_[cell];
        }
    }
}

void ShadowPool::put(EntryNumber entry) noexcept {
    std::size_t cell = cell_of(residents_[entry].name);
    while (cells_[cell] != kNoEntry) {
        cell = (cell + 1) & (cells_.size() - 1);
    }
    cells_[cell] = entry;
}

// Those behind it move up, so that none is looked for behind an empty cell.
void ShadowPool::take_out(std::uint64_t name) noexcept {
    const std::size_t mask = cells_.size() - 1;
    std::size_t hole = cell_of(name);
    while (residents_[cells_[hole]].name != name) {
        hole = (hole + 1) & mask;
    }
    for (std::size_t cell = (hole + 1) & mask; cells_[cell] != kNoEntry; cell = (cell + 1) & mask) {
        const std::size_t home = cell_of(residents_[cells_[cell]].name);
        if (((cell - home) & mask) >= ((cell - hole) & mask)) {
            cells_[hole] = cells_[cell];
            hole = cell;
        }
    }
    cells_[hole] = kNoEntry;
}

void ShadowPool::admit(const ShadowRecord& record, bool is_for_use) {
    tell_uses();
    if (!make_room(record.size_bytes)) {
        return;
    }
    if (2 * (count() + 1) > cells_.size()) {
        cells_.assign(2 * cells_.size(), kNoEntry);
        for (EntryNumber entry = 0; entry < residents_.size(); ++entry) {
            if (residents_[entry].request != 0) {
                put(entry);
            }
        }
    }
    if (free_.empty()) {
        free_.push_back(static_cast<EntryNumber>(residents_.size()));
        residents_.emplace_back();
    }
    const EntryNumber entry = free_.back();
    free_.pop_back();
    const EntryNumber parent = record.parent == 0 ? kNoEntry : find(record.parent);
    residents_[entry] = {
        .name = record.name, .size_bytes = record.size_bytes, .request = request_, .is_for_use = is_for_use};
    put(entry);
    used_bytes_ += record.size_bytes;
    policy_->admit({.entry = entry,
                    .parent = parent,
                    .name = record.name,
                    .size_bytes = record.size_bytes,
                    .reuse = record.reuse,
                    .needs_state = record.needs_state,
                    .window_blocks = record.window_blocks,
                    .group = record.group});
}

// Evicts until the record fits. Returns false if the running request's own records leave no room for it.
bool ShadowPool::make_room(std::uint64_t size_bytes) {
    if (size_bytes > bounds_.capacity_bytes) {
        return false;
    }
    while (used_bytes_ + size_bytes > bounds_.capacity_bytes || count() >= bounds_.entry_limit) {
        const EntryNumber victim = policy_->choose_victim();
        if (victim == kNoEntry) {
            return false;
        }
        if (residents_[victim].request != request_) {
            forget(victim, true);
        } else if (keeps_left_ > 0) {
            keeps_left_ -= 1;
            policy_->keep(victim);
        } else {
            return false;
        }
    }
    return true;
}

void ShadowPool::forget(EntryNumber entry, bool was_evicted) {
    policy_->remove(entry, was_evicted);
    used_bytes_ -= residents_[entry].size_bytes;
    take_out(residents_[entry].name);
    residents_[entry].request = 0;
    free_.push_back(entry);
}

void ShadowPool::tell_uses() {
    if (!used_.empty()) {
        policy_->touch(used_);
        used_.clear();
    }
}

}  // namespace kvo
