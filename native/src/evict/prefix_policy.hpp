// The default policy: prefix order, and a value for everything that is learned from how it is used again.
//
//  1. Only an entry on which no other hangs may go: a sequence is evicted from its end, parents outlive children.
//  2. Entries that no acquire can use go first, unless they have just come: blocks behind the last state, windows that
//     no state needs, entries whose parent is not here. With a state go its window and all up to the next branch.
//     Without states, the last window block of a sequence is its end: with it go the rest of its window, in all
//     groups, and the blocks up to the boundary before.
//  3. The rest is sorted into classes and by age. For each the policy learns how likely reuse is
//     and how long it takes, from what is here and from the names it evicted (prefix_reuse.hpp, prefix_queues.hpp).
//     The entry with the least hits to expect per place and time goes first.
//  4. An entry that a slower tier also has is worth a share of that: losing it costs only a load.
//  5. Sizes do not enter: what a hit saves grows with the bytes it serves. Time is counted in entries admitted and
//     touched. Nothing is set for a workload, and what is drawn is the same in each run.
//
// In whatever order blocks are published, a touch visits at most 16 entries for each of its own. A block has no more
// windows and states than a model has groups, and a window counts at most 1,024 blocks. A state costs as many steps as
// it has blocks in its window or before the last state (256 at most where there are no windows), an end without states
// those of its window when it goes, all else constant time; what is learned is looked at once in a sixty-fourth of a
// turnover. Memory: a node of 24 bytes an entry and four ghosts of 4 bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "evict/eviction_policy.hpp"
#include "evict/prefix_queues.hpp"
#include "evict/prefix_reuse.hpp"

namespace kvo {

class PrefixPolicy final : public EvictionPolicy {
public:
    explicit PrefixPolicy(PolicyBounds bounds) : bounds_(bounds), queues_(nodes_) {}

    void expect_admission(std::uint64_t name) const override;
    void admit(const Admission& admission) override;
    void touch(std::span<const EntryNumber> entries) override;
    void spare(EntryNumber entry) override;
    void note_tier(EntryNumber entry, bool has) override;
    EntryNumber choose_victim() override;
    EntryNumber expect_victim() const override;
    double value_of(EntryNumber entry) const override;
    void keep(EntryNumber entry) override;
    void remove(EntryNumber entry, bool was_evicted) override;

    // Entries visited by walks up a sequence or along what hangs on a block, in all: work that needs no clock to be
    // seen.
    std::uint64_t walked() const noexcept { return walked_; }

private:
    static constexpr std::uint32_t kEpochsPerTurnover = 64;
    static constexpr std::uint64_t kLeastEpoch = 16;  // in entries: in a small cache a look at all lists costs more
    static constexpr std::uint64_t kEpochsPerEstimate = 2;
    static constexpr std::uint64_t kEpochsPerFade = 256;
    static constexpr std::uint64_t kLeastPerFade = 8000;  // in entries: fewer say too little
    static constexpr std::uint32_t kGhostsPerEntry = 4;
    static constexpr std::uint32_t kHomeBlocks = 4;       // neighbours whose ghosts lie together
    static constexpr std::uint32_t kStepsToPassed = 256;  // up to the state before
    static constexpr std::uint32_t kStepsToState = 64;    // of blocks behind the last state
    static constexpr std::size_t kReaches = 8;
    static constexpr std::uint32_t kReachLimit = 1024;     // blocks of a window that stay together
    static constexpr std::uint32_t kAttachedLimit = 64;    // windows and states of one block
    static constexpr std::uint64_t kStepsToAncestor = 16;  // for each entry of a touch, on average

    // The tree.
    EntryNumber parent_of(const PrefixNode& node) const noexcept;
    void hang(EntryNumber entry, EntryNumber parent);
    EntryNumber unhang(EntryNumber entry);
    void unhang_attached(EntryNumber entry, EntryNumber parent) noexcept;
    void adopt(EntryNumber entry, EntryNumber parent, std::uint64_t& steps);
    void forget_left_behind(const PrefixNode& node);
    void renew_parity(EntryNumber entry);
    void orphan_children(EntryNumber entry);

    // Windows and states.
    struct PassedState {
        EntryNumber state = kNoEntry;  // none: there is none near
        std::uint32_t blocks = 0;      // to it, or looked at
    };

    void note_window(std::uint32_t blocks) noexcept;
    PassedState announce_state(EntryNumber state);
    void withdraw_state(EntryNumber state);
    EntryNumber find_stranded() const noexcept;
    bool is_growing(EntryNumber entry) const noexcept;
    std::uint32_t count_continuations(EntryNumber block) const noexcept;
    std::uint32_t count_attached(const PrefixNode& block) const noexcept;
    EntryNumber state_at(EntryNumber block) const noexcept;
    void need_windows(EntryNumber block) noexcept;
    void release_windows(EntryNumber block, std::uint32_t states) noexcept;
    void file_windows(EntryNumber block) noexcept;

    // Windows where no states are.
    EntryNumber window_before(EntryNumber window) const noexcept;
    void hold_window_before(EntryNumber window) noexcept;
    void hold(EntryNumber window) noexcept;
    void end_boundary(EntryNumber window) noexcept;
    void release_window_before(EntryNumber window) noexcept;
    void end_run_at(EntryNumber end) noexcept;
    EntryNumber find_window(EntryNumber attached, std::uint16_t mark) const noexcept;
    void file_useless(EntryNumber entry) noexcept;
    std::uint32_t reach_of(const PrefixNode& window) const noexcept {
        return std::min(window_blocks_[window.mark], kReachLimit);
    }

    // Classes and queues.
    EntryClass class_of(const Admission& admission);
    EntryClass prefix_class(const Admission& admission);
    EntryClass window_class(const Admission& admission);
    EntryClass state_class(const Admission& admission);
    void set_class(PrefixNode& node, EntryClass kind) noexcept;
    void lose(PrefixNode& node) noexcept;
    void pass(EntryNumber entry) noexcept;
    void file(EntryNumber entry, QueueEnd end) noexcept;
    void unfile(EntryNumber entry) noexcept;
    void refile(EntryNumber entry) noexcept;

    // Time and what is learned in it.
    void count_time(std::uint64_t entries);
    void advance();
    void estimate();
    void rank();
    void touch_one(EntryNumber entry);
    void follow(EntryClass kind, std::uint16_t epoch) noexcept { followed_[kind][ages_.slot_of(epoch)] += 1; }
    void unfollow(EntryClass kind, std::uint16_t epoch) noexcept;
    void remember(PrefixNode& node);
    EntryClass recall(const PrefixNode& node) noexcept;
    static std::uint32_t short_name(std::uint64_t name) noexcept {
        return static_cast<std::uint32_t>(name ^ (name >> 32));
    }
    // The same numbers in each run, none like the one before.
    std::uint64_t draw() noexcept {
        drawn_ = drawn_ * 6364136223846793005U + 1442695040888963407U;
        return drawn_ >> 32;
    }
    static std::uint32_t home_of(const PrefixNode& node) noexcept;
    std::uint16_t epoch() const noexcept { return static_cast<std::uint16_t>(ages_.now()); }

    PolicyBounds bounds_;
    PrefixNodes nodes_;
    PrefixQueues queues_;
    AgeLadder ages_;
    ReuseTable reuse_;
    PrefixGhosts ghosts_;
    std::array<std::array<std::uint32_t, AgeLadder::kSlots>, kClassCount> followed_{};

    mutable std::uint64_t walked_ = 0;
    std::uint64_t known_count_ = 0;
    std::uint64_t admitted_count_ = 0;
    std::uint64_t admitted_bytes_ = 0;
    std::uint64_t epoch_left_ = kLeastEpoch;
    std::uint64_t estimated_at_ = 0;
    std::uint64_t faded_at_ = 0;
    std::uint64_t counted_since_fade_ = 0;
    std::uint64_t drawn_ = 0;

    // The run that is being added.
    EntryNumber run_end_ = kNoEntry;
    std::uint32_t run_blocks_ = 0;
    EntryClass run_class_ = kPrefixFresh;
    std::uint32_t window_count_ = 0;
    EntryNumber last_window_block_ = kNoEntry;
    std::array<EntryNumber, 512> window_run_{};  // its windows, in turn; longer ones are never passed

    // Window length in blocks, by the low bits of the group's number. If engines with different windows share the bits,
    // the last one counts.
    std::array<std::uint32_t, 8> window_blocks_{};

    // Window lengths seen, each longer than the one before. A state counts with the longest of its time.
    std::array<std::uint32_t, kReaches> reaches_{};
    std::uint32_t reach_ = 0;

    // Children left behind by parents that were taken away, by number and parity of the parent; as a rule empty.
    std::unordered_map<std::uint64_t, std::uint32_t> left_behind_;
};

// Makes the prefix policy, which a cache uses unless it is given another one.
std::unique_ptr<EvictionPolicy> make_prefix_policy(PolicyBounds bounds);

}  // namespace kvo
