// Decides which entry to evict first when memory is full. A policy orders entries and never changes one.
//
//     admit ──► known ──touch*──► choose_victim ──remove──► forgotten (or remembered by name)
//                                      └──keep──► still known
//
// All calls come from one thread at a time, under the cache's writer lock; none may block. A policy holds its facts
// about an entry in arrays by entry number, at most 40 bytes an entry with the names it remembers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "base/entry_number.hpp"

namespace kvo {

// How the blocks of a group may be reused. It determines what an entry is worth without its neighbours.
enum class Reuse : std::uint8_t {
    prefix,  // needs all blocks before it: full attention, MLA
    window,  // a boundary needs the last `window_blocks` blocks: sliding window, chunks
    exact,   // a boundary needs the state that was saved exactly there: recurrent layers
};

// An entry that became readable.
struct Admission {
    EntryNumber entry = kNoEntry;
    // The entry without which this one is useless. For a prefix block, the block before it; for a window block or a
    // state, the prefix group's block that ends at the same token. kNoEntry if this is the first block, or if that
    // entry is not in memory.
    EntryNumber parent = kNoEntry;
    std::uint64_t name = 0;        // 64 bits of its key: the same if it is evicted and comes again
    std::uint64_t size_bytes = 0;  // of its slot
    Reuse reuse = Reuse::prefix;
    bool needs_state = false;         // its engine also has states: a prefix without one near its end is of no use
    std::uint32_t window_blocks = 0;  // of a window group
    std::uint32_t group = 0;          // its number: tells the blocks of two prefix groups apart in a touch
};

class EvictionPolicy {
public:
    virtual ~EvictionPolicy() = default;

    // An entry with this name and kind of reuse may well be admitted soon. Changes nothing.
    virtual void expect_admission(std::uint64_t name) const { (void)name; }

    // Parents are admitted before their children where both come in one commit.
    virtual void admit(const Admission& admission) = 0;

    // Entries that one acquire leased, in the order of the request, groups one after the other. All are known.
    virtual void touch(std::span<const EntryNumber> entries) = 0;

    // A request computed this entry's block itself, without loading it, and saves the blocks that follow. They are
    // useless without this entry, so it should stay.
    virtual void spare(EntryNumber entry) { (void)entry; }

    // Notes whether a slower tier also has a known entry. If so, losing the entry costs a load from there and no
    // computation. A policy may ignore this.
    virtual void note_tier(EntryNumber entry, bool has) { (void)entry, (void)has; }

    // Returns the entry to evict next, or kNoEntry if none is known. The entry stays known, and the answer stays the
    // same until another function is called.
    virtual EntryNumber choose_victim() = 0;

    // Returns the entry that is likely to be chosen next, or kNoEntry if the policy cannot tell. The caller prefetches
    // that entry's memory. Changes nothing.
    virtual EntryNumber expect_victim() const { return kNoEntry; }

    // Returns what a known entry is worth: of two entries, the one with the lower number goes first, unless others need
    // it. That a tier has an entry, too, doesn't count. 0: the policy cannot tell. Changes nothing.
    virtual double value_of(EntryNumber entry) const { return (void)entry, 0.0; }

    // The chosen victim is in use and cannot go now: ask for others first. When each that was offered has been kept
    // twice in a row, each that may go has been offered. A policy that keeps prefix order offers no entry while others
    // need it: one in use keeps those before it.
    virtual void keep(EntryNumber entry) = 0;

    // The entry is gone: evicted as a victim, or taken away for another reason (then its name is not worth a memory).
    virtual void remove(EntryNumber entry, bool was_evicted) = 0;
};

// How large its memory may get. `entry_limit` entries of all sizes, `capacity_bytes` of them.
struct PolicyBounds {
    EntryNumber entry_limit = 0;
    std::uint64_t capacity_bytes = 0;
};

// Makes a new policy within these bounds.
using MakePolicy = std::function<std::unique_ptr<EvictionPolicy>(PolicyBounds bounds)>;

}  // namespace kvo
