// The entries that may go, in lists by class, age and whether a tier has them, too, and which list goes first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "evict/prefix_ages.hpp"
#include "evict/prefix_node.hpp"

namespace kvo {

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
