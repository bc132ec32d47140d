// The entries that may go, in lists by class, age and whether a tier has them, too, and which list goes first.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/entry_number.hpp"
#include "evict/entry_lists.hpp"
#include "evict/eviction_policy.hpp"
#include "evict/prefix_reuse.hpp"

namespace kvo {

// The prefix policy's facts about one entry, in 24 bytes.

// | field          | a block of a prefix with children | without | a window block or state |
// |----------------|-----------------------------------|---------|-------------------------|
// | `older`        | how many entries hang on it       | link    | link                    |
// | `newer`        | first window block or state of it | link    | link                    |
// | `extra`        | with states: how many need its    | same    | next one of its block   |
// |                | window; else: home of its ghost   |         |                         |
struct PrefixNode {
    static constexpr std::uint16_t kNotKnown = 3;  // no Reuse

    EntryNumber parent = kNoEntry;
    std::uint32_t name = 0;
    EntryNumber older = 0;  // links hold the number of a list, too: where it ends
    EntryNumber newer = kNoEntry;
    std::uint32_t extra = 0;
    std::uint16_t epoch = 0;  // of its last use
    std::uint16_t kind : 5 = kNoClass;
    std::uint16_t reuse : 2 = kNotKnown;
    std::uint16_t needs_state : 1 = 0;
    std::uint16_t is_in_tier : 1 = 0;  // a tier below memory has it, too
    std::uint16_t is_queued : 1 = 0;
    // A child belongs to its parent only if these agree: a number is used again while children of the old entry live.
    std::uint16_t parity : 1 = 0;
    std::uint16_t parent_parity : 1 = 0;
    // Of a window block in no queue, where no states are: the one behind it needs it. In a queue: it is there whatever
    // its class says, as it is kept or of no use.
    std::uint16_t is_held : 1 = 0;
    std::uint16_t mark : 3 = 0;  // its group's low bits; of a state: which window length it counted with

    bool is_known() const noexcept { return reuse != kNotKnown; }
    bool is(Reuse other) const noexcept { return reuse == static_cast<std::uint16_t>(other); }
    bool is_held_back() const noexcept { return is_held != 0 && is_queued == 0; }
    EntryClass entry_class() const noexcept { return static_cast<EntryClass>(kind); }
};
static_assert(sizeof(PrefixNode) == 24, "what eviction_policy.hpp allows an entry");

using PrefixNodes = ChunkedArray<PrefixNode>;

// Names the prefix policy remembers after eviction: their class and the epoch of their last use, in four bytes.
//
// Sets of sixteen places, a cache line each, newest first; the last makes way. The home, a hash that a few neighbours
// share, chooses the set. A name is told from others in it by 15 bits that are not all 0: one in two thousand look-ups
// finds another's, which costs a little accuracy and nothing else.

struct Ghost {
    std::size_t kind = 0;
    std::uint16_t epoch = 0;
    bool is_found = false;
};

class PrefixGhosts {
public:
    PrefixGhosts() { sets_.grow_to(0); }

    // Makes place for that many, one set more each call at most; never fewer.
    void grow_to(std::uint64_t limit) {
        if (limit / kPlaces < set_count_) {
            return;
        }
        // A set is split in two like this: both get all of it, and the half that is now in the wrong one ages.
        const Set split = sets_.grow_to(set_count_ - std::bit_floor(set_count_));
        sets_.grow_to(set_count_) = split;
        set_count_ += 1;
    }

    // Where its set lies, to ask for the memory in advance. (Calls that do nothing else the compiler may take out.)
    const void* address_of(std::uint32_t home) const noexcept { return &sets_[set_of(home)]; }

    // Forgets the name.
    Ghost take(std::uint32_t home, std::uint32_t name, std::uint64_t now) noexcept {
        Set& set = sets_[set_of(home)];
        const std::uint32_t tag = tag_of(name);
        std::uint32_t found = 0;
        for (std::size_t place = 0; place < kPlaces; ++place) {
            found |= std::uint32_t{(set[place] >> kTagShift) == tag} << place;
        }
        if (found == 0) {
            return {};
        }
        return read(std::exchange(set[static_cast<std::size_t>(std::countr_zero(found))], 0), now);
    }

    // The ghost that made way.
    Ghost add(std::uint32_t home, std::uint32_t name, std::size_t kind, std::uint16_t epoch,
              std::uint64_t now) noexcept {
        Set& set = sets_[set_of(home)];
        const std::uint32_t last = set.back();
        std::copy_backward(set.begin(), set.end() - 1, set.end());
        set.front() =
            (tag_of(name) << kTagShift) | (static_cast<std::uint32_t>(kind) << kEpochBits) | (epoch & kEpochMask);
        return last == 0 ? Ghost{} : read(last, now);
    }

private:
    static constexpr std::size_t kPlaces = 16;
    static constexpr std::uint32_t kEpochBits = 12;
    static constexpr std::uint32_t kEpochMask = (1U << kEpochBits) - 1;
    static constexpr std::uint32_t kTagShift = kEpochBits + 5;

    struct alignas(64) Set : std::array<std::uint32_t, kPlaces> {};

    std::size_t set_of(std::uint32_t home) const noexcept {
        const std::size_t power = std::bit_ceil(set_count_);
        const std::size_t set = home & (power - 1);
        return set < set_count_ ? set : set - power / 2;
    }
    static std::uint32_t tag_of(std::uint32_t name) noexcept { return (name >> 17) | 1; }
    static std::uint32_t age_of(std::uint32_t place, std::uint64_t now) noexcept {
        return (static_cast<std::uint32_t>(now) - place) & kEpochMask;
    }
    static Ghost read(std::uint32_t place, std::uint64_t now) noexcept {
        return {(place >> kEpochBits) % 32, static_cast<std::uint16_t>(now - age_of(place, now)), true};
    }

    std::size_t set_count_ = 1;
    ChunkedArray<Set> sets_;
};

enum class QueueEnd : std::uint8_t { oldest, newest };

class PrefixQueues {
public:
    explicit PrefixQueues(PrefixNodes& nodes);

    // An entry in no list. Entries of one list leave it from its oldest end.
    void push(EntryNumber entry, EntryClass kind, std::size_t slot, QueueEnd end) noexcept;
    void push_kept(EntryNumber entry) noexcept { link(entry, kKeptList, QueueEnd::newest); }
    void unlink(EntryNumber entry) noexcept;

    // The next one to go; those kept only when there is no other. Needs ranks.
    EntryNumber choose() noexcept;
    // Whom `choose` would find at once.
    EntryNumber expect() const noexcept { return heap_.empty() ? kNoEntry : first(heap_.front().list); }
    EntryNumber first_kept() const noexcept { return first(kKeptList); }

    // The lists of two slots become one, for all classes.
    void merge(std::size_t from, std::size_t into) noexcept;

    // Ranks are wanted again when time has passed or a class has got its first entry.
    bool is_ranked() const noexcept { return is_ranked_; }
    void forget_ranks() noexcept { is_ranked_ = false; }

    // Orders the queues by value(class, age): the lowest goes first, and the oldest among equals. Entries that a tier
    // has count only a share of their value.
    template <typename Value>
    void rank(const AgeLadder& ladder, Value value);

private:
    // Share of its value that an entry keeps if a slower tier has it too: losing it then costs only a load. Tiers
    // differ: a third is too much for a fast one and too little for a slow one, but gains nearly as much as a tenth.
    static constexpr double kTierShare = 0.3;
    static constexpr std::size_t kRows = std::size_t{kUseless + 1} + kClassCount;  // by class; then those in a tier
    static constexpr std::size_t kLists = kRows * AgeLadder::kSlots;
    static constexpr std::size_t kKeptList = kLists;
    static constexpr EntryNumber kFirstEnd = 0xffffe000;  // links from here on are numbers of lists

    struct List {
        EntryNumber oldest = kNoEntry;
        EntryNumber newest = kNoEntry;
    };

    // The next to go has the lowest value, is the oldest among equals.
    struct Ranked {
        double value = 0.0;
        std::uint32_t age = 0;
        std::uint32_t list = 0;

        bool operator<(const Ranked& other) const noexcept {
            if (value != other.value) {
                return value > other.value;
            }
            return age != other.age ? age < other.age : list > other.list;
        }
    };

    static_assert(kFirstEnd + kLists < kNoEntry);

    static std::size_t row_of(EntryClass kind, bool is_in_tier) noexcept {
        return is_in_tier && kind < kClassCount ? std::size_t{kUseless + 1} + kind : kind;
    }
    static std::size_t list_of(std::size_t row, std::size_t slot) noexcept { return row * AgeLadder::kSlots + slot; }
    static EntryNumber end_of(std::size_t list) noexcept { return kFirstEnd + static_cast<EntryNumber>(list); }
    EntryNumber first(std::size_t list) const noexcept {
        return lists_[list].oldest == end_of(list) ? kNoEntry : lists_[list].oldest;
    }

    EntryNumber& newer_of(EntryNumber link) noexcept;
    EntryNumber& older_of(EntryNumber link) noexcept;
    void link(EntryNumber entry, std::size_t list, QueueEnd end) noexcept;

    PrefixNodes& nodes_;
    std::array<List, kLists + 1> lists_;
    std::array<bool, kRows> is_seen_{};  // the row had an entry
    bool is_ranked_ = false;
    std::vector<Ranked> ranks_;  // by list, of this epoch
    std::vector<Ranked> heap_;   // of lists that may have entries
    std::array<bool, kLists> is_in_heap_{};
};

template <typename Value>
void PrefixQueues::rank(const AgeLadder& ladder, Value value) {
    heap_.clear();
    is_in_heap_.fill(false);
    ladder.each_slot([&](std::size_t slot, std::uint32_t age) {
        for (std::size_t row = 0; row < kRows; ++row) {
            if (!is_seen_[row]) {
                continue;
            }
            const std::size_t list = list_of(row, slot);
            const bool is_in_tier = row > kUseless;
            const auto kind = static_cast<EntryClass>(is_in_tier ? row - kUseless - 1 : row);
            const double share = is_in_tier ? kTierShare : 1.0;
            ranks_[list] = {share * value(kind, age), age, static_cast<std::uint32_t>(list)};
            if (first(list) != kNoEntry) {
                heap_.push_back(ranks_[list]);
                is_in_heap_[list] = true;
            }
        }
    });
    std::make_heap(heap_.begin(), heap_.end());
    is_ranked_ = true;
}

}  // namespace kvo
