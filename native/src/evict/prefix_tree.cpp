// The tree of the prefix policy: what hangs on what, and what a state needs.
#include <algorithm>

#include "evict/prefix_policy.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t left_key(EntryNumber parent, std::uint32_t parity) noexcept {
    return std::uint64_t{parent} * 2 + parity;
}

}  // namespace

EntryNumber PrefixPolicy::parent_of(const PrefixNode& node) const noexcept {
    if (node.parent == kNoEntry) {
        return kNoEntry;
    }
    const PrefixNode& parent = nodes_[node.parent];
    return parent.is_known() && parent.parity == node.parent_parity ? node.parent : kNoEntry;
}

void PrefixPolicy::hang(EntryNumber entry, EntryNumber parent) {
    if (parent >= nodes_.size() || parent == entry || !nodes_[parent].is(Reuse::prefix)) {
        return;
    }
    unfile(parent);
    PrefixNode& node = nodes_[entry];
    PrefixNode& above = nodes_[parent];
    if (!node.is(Reuse::prefix) && above.older >= kAttachedLimit && count_attached(above) >= kAttachedLimit) {
        return;  // no model has so many groups
    }
    node.parent = parent;
    node.parent_parity = above.parity;
    above.older += 1;
    if (!node.is(Reuse::prefix)) {
        node.extra = above.newer;
        above.newer = entry;
    }
}

// The parent if nothing hangs on that any more.
EntryNumber PrefixPolicy::unhang(EntryNumber entry) {
    const PrefixNode& node = nodes_[entry];
    const EntryNumber parent = parent_of(node);
    if (parent == kNoEntry) {
        forget_left_behind(node);
        return kNoEntry;
    }
    if (!node.is(Reuse::prefix)) {
        unhang_attached(entry, parent);
    }
    return --nodes_[parent].older == 0 ? parent : kNoEntry;
}

// A block came before `entry` in an acquire and was not known when that was admitted. Where `steps` do not suffice to
// see that the block is not one of those behind it, nothing changes.
void PrefixPolicy::adopt(EntryNumber entry, EntryNumber parent, std::uint64_t& steps) {
    PrefixNode& node = nodes_[entry];
    const PrefixNode& above = nodes_[parent];
    if (!node.is(Reuse::prefix) || !above.is(Reuse::prefix) || node.mark != above.mark || parent_of(node) != kNoEntry) {
        return;
    }
    const bool has_children = node.is_queued == 0 && node.older > 0;
    for (EntryNumber at = parent; has_children && at != kNoEntry; at = parent_of(nodes_[at])) {
        if (at == entry || steps == 0) {
            return;
        }
        --steps;
        ++walked_;
    }
    forget_left_behind(node);
    node.parent = kNoEntry;
    hang(entry, parent);
}

// One of those whose parent was taken away finds another, or goes.
void PrefixPolicy::forget_left_behind(const PrefixNode& node) {
    if (node.parent == kNoEntry) {
        return;
    }
    const auto left = left_behind_.find(left_key(node.parent, node.parent_parity));
    if (left != left_behind_.end() && --left->second == 0) {
        left_behind_.erase(left);
    }
}

void PrefixPolicy::unhang_attached(EntryNumber entry, EntryNumber parent) noexcept {
    EntryNumber* link = &nodes_[parent].newer;
    while (*link != entry) {
        ++walked_;
        link = &nodes_[*link].extra;
    }
    *link = nodes_[entry].extra;
}

// The entry's number is used again: children of the one that had it must not count as its own.
void PrefixPolicy::renew_parity(EntryNumber entry) {
    if (left_behind_.empty()) {
        return;
    }
    PrefixNode& node = nodes_[entry];
    if (!left_behind_.contains(left_key(entry, node.parity))) {
        return;
    }
    node.parity ^= 1;
    if (!left_behind_.contains(left_key(entry, node.parity))) {
        return;
    }
    // The number has children of two former entries. One parity bit cannot tell them apart, so they lose their parent.
    for (EntryNumber child = 0; child < nodes_.size(); ++child) {
        if (nodes_[child].is_known() && nodes_[child].parent == entry) {
            nodes_[child].parent = kNoEntry;
        }
    }
    left_behind_.erase(left_key(entry, 0));
    left_behind_.erase(left_key(entry, 1));
}

// A block is taken away while others hang on it.
void PrefixPolicy::orphan_children(EntryNumber entry) {
    PrefixNode& node = nodes_[entry];
    for (EntryNumber attached = node.newer; attached != kNoEntry;) {
        PrefixNode& orphan = nodes_[attached];
        const EntryNumber next = orphan.extra;
        if (orphan.is(Reuse::exact)) {
            withdraw_state(attached);
        }
        if (orphan.is(Reuse::window)) {
            release_window_before(attached);
        }
        unfile(attached);
        orphan.is_held = 0;
        set_class(orphan, kUseless);
        orphan.parent = kNoEntry;
        node.older -= 1;
        file(attached, QueueEnd::newest);
        attached = next;
    }
    node.newer = kNoEntry;
    // States below can no longer be followed up to the windows they need.
    EntryNumber above = parent_of(node);
    for (std::uint32_t step = 1; step < reaches_[reach_] && above != kNoEntry; ++step) {
        release_windows(above, node.extra);
        above = parent_of(nodes_[above]);
    }
    if (node.older > 0) {
        left_behind_[left_key(entry, node.parity)] = node.older;
    }
    node.older = 0;
}

void PrefixPolicy::note_window(std::uint32_t blocks) noexcept {
    blocks = std::min(blocks, kReachLimit);
    if (blocks > reaches_[reach_] && reach_ + 1 < kReaches) {
        reaches_[++reach_] = blocks;
    }
}

EntryNumber PrefixPolicy::state_at(EntryNumber block) const noexcept {
    const PrefixNode& node = nodes_[block];
    EntryNumber attached = node.is_queued == 0 && node.older > 0 ? node.newer : kNoEntry;
    while (attached != kNoEntry && !nodes_[attached].is(Reuse::exact)) {
        ++walked_;
        attached = nodes_[attached].extra;
    }
    return attached;
}

// The windows it needs stay with it, and the state before it in the sequence was passed.
PrefixPolicy::PassedState PrefixPolicy::announce_state(EntryNumber state) {
    nodes_[state].mark = static_cast<std::uint16_t>(reach_ & 7);
    const std::uint32_t reach = reaches_[reach_];
    PassedState passed;
    EntryNumber block = nodes_[state].parent;
    for (std::uint32_t step = 0; block != kNoEntry; ++step) {
        ++walked_;
        if (step < reach) {
            need_windows(block);
        }
        if (step > 0 && passed.state == kNoEntry) {
            passed = {state_at(block), step};
        }
        if (step + 1 >= reach && (passed.state != kNoEntry || step + 1 >= kStepsToPassed)) {
            break;
        }
        block = parent_of(nodes_[block]);
    }
    if (passed.state != kNoEntry) {
        pass(passed.state);
    }
    return passed;
}

void PrefixPolicy::withdraw_state(EntryNumber state) {
    const std::uint32_t reach = reaches_[nodes_[state].mark % kReaches];
    EntryNumber block = parent_of(nodes_[state]);
    for (std::uint32_t step = 0; step < reach && block != kNoEntry; ++step) {
        ++walked_;
        release_windows(block, 1);
        block = parent_of(nodes_[block]);
    }
}

void PrefixPolicy::need_windows(EntryNumber block) noexcept {
    if (nodes_[block].needs_state != 0 && nodes_[block].extra++ == 0) {
        file_windows(block);
    }
}

void PrefixPolicy::release_windows(EntryNumber block, std::uint32_t states) noexcept {
    PrefixNode& node = nodes_[block];
    const std::uint32_t released = node.needs_state != 0 ? std::min(node.extra, states) : 0;
    node.extra -= released;
    if (released > 0 && node.extra == 0) {
        file_windows(block);
    }
}

// Its windows are needed from now on, or no longer.
void PrefixPolicy::file_windows(EntryNumber block) noexcept {
    const PrefixNode& node = nodes_[block];
    EntryNumber attached = node.is_queued == 0 && node.older > 0 ? node.newer : kNoEntry;
    for (; attached != kNoEntry; attached = nodes_[attached].extra) {
        ++walked_;
        if (nodes_[attached].is(Reuse::window) && nodes_[attached].kind == kNoClass) {
            unfile(attached);
            file(attached, QueueEnd::newest);
        }
    }
}

// The group's window block of the block before.
EntryNumber PrefixPolicy::window_before(EntryNumber window) const noexcept {
    const EntryNumber block = parent_of(nodes_[window]);
    const EntryNumber above = block == kNoEntry ? kNoEntry : parent_of(nodes_[block]);
    return above == kNoEntry ? kNoEntry : find_window(nodes_[above].newer, nodes_[window].mark);
}

EntryNumber PrefixPolicy::find_window(EntryNumber attached, std::uint16_t mark) const noexcept {
    while (attached != kNoEntry && !(nodes_[attached].is(Reuse::window) && nodes_[attached].mark == mark)) {
        ++walked_;
        attached = nodes_[attached].extra;
    }
    return attached;
}

void PrefixPolicy::hold(EntryNumber window) noexcept {
    unfile(window);
    nodes_[window].is_held = 1;
}

// A boundary at `window` needs those before it: they stay with it.
void PrefixPolicy::hold_window_before(EntryNumber window) noexcept {
    const std::uint32_t reach = reach_of(nodes_[window]);
    EntryNumber before = window_before(window);
    for (std::uint32_t step = 1; step < reach && before != kNoEntry && !nodes_[before].is_held_back(); ++step) {
        hold(before);
        before = window_before(before);
    }
}

// It goes: no boundary is here any more that needs the other groups' windows of its block, or those before it alone.
void PrefixPolicy::end_boundary(EntryNumber window) noexcept {
    const EntryNumber block = parent_of(nodes_[window]);
    if (block == kNoEntry || nodes_[block].needs_state != 0) {
        return;
    }
    for (EntryNumber other = nodes_[block].newer; other != kNoEntry; other = nodes_[other].extra) {
        ++walked_;
        if (other != window && nodes_[other].is(Reuse::window) && !nodes_[other].is_held_back()) {
            file_useless(other);
        }
    }
    release_window_before(window);
}

void PrefixPolicy::release_window_before(EntryNumber window) noexcept {
    // More than one only where two groups have the same low bits.
    for (EntryNumber before = window_before(window); before != kNoEntry;
         before = find_window(nodes_[before].extra, nodes_[before].mark)) {
        if (nodes_[before].is_held_back()) {
            end_run_at(before);
        }
    }
}

// Where a whole window is left, the last boundary is there now; a part of one goes.
void PrefixPolicy::end_run_at(EntryNumber end) noexcept {
    const std::uint32_t reach = reach_of(nodes_[end]);
    std::uint32_t count = 1;
    EntryNumber first = end;
    for (EntryNumber before = window_before(end); before != kNoEntry && count < reach; ++count) {
        ++walked_;
        first = before;
        before = window_before(before);
    }
    nodes_[end].is_held = 0;
    if (count >= reach) {
        file(end, QueueEnd::oldest);
        if (first != end) {
            hold(first);
        }
        return;
    }
    for (EntryNumber before = end; before != kNoEntry; before = window_before(before)) {
        nodes_[before].is_held = 0;
        file_useless(before);
    }
}

void PrefixPolicy::file_useless(EntryNumber entry) noexcept {
    unfile(entry);
    queues_.push(entry, kUseless, ages_.slot_of(nodes_[entry].epoch), QueueEnd::oldest);
    nodes_[entry].is_held = 1;
}

// Whether the entry is a block behind the last state of a sequence that was just in use: the blocks that the sequence
// computes next will hang on it. False if several sequences go on from the used block, as any of them may be the one.
bool PrefixPolicy::is_growing(EntryNumber entry) const noexcept {
    const PrefixNode& node = nodes_[entry];
    if (node.kind != kNoClass || !node.is(Reuse::prefix)) {
        return false;
    }
    EntryNumber block = parent_of(node);
    for (std::uint32_t step = 0; step < kStepsToState && block != kNoEntry; ++step) {
        if (count_continuations(block) != 1) {
            return false;
        }
        if (nodes_[block].epoch == epoch()) {
            return true;
        }
        block = parent_of(nodes_[block]);
    }
    return false;
}

// Number of children of a block that are blocks; the block must have children.
std::uint32_t PrefixPolicy::count_continuations(EntryNumber block) const noexcept {
    return nodes_[block].older - count_attached(nodes_[block]);
}

// Number of windows and states of a block; the block must have children.
std::uint32_t PrefixPolicy::count_attached(const PrefixNode& block) const noexcept {
    std::uint32_t count = 0;
    for (EntryNumber attached = block.newer; attached != kNoEntry; attached = nodes_[attached].extra) {
        ++walked_;
        count += 1;
    }
    return count;
}

}  // namespace kvo
