// Containers for the facts that a policy keeps about its entries, as arrays by entry number, and for their order:
// doubly linked lists from newest to oldest, whose links are entry numbers too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/entry_number.hpp"

namespace kvo {

// Grows chunk by chunk: no item moves, and no moment needs twice the memory.
template <typename Item>
class ChunkedArray {
public:
    // Makes place for number `at` too. References stay good.
    Item& grow_to(std::size_t at) {
        while (at >= chunks_.size() * kChunkItems) {
            chunks_.push_back(std::make_unique<Item[]>(kChunkItems));
        }
        return (*this)[at];
    }

    Item& operator[](std::size_t at) noexcept { return chunks_[at / kChunkItems][at % kChunkItems]; }
    const Item& operator[](std::size_t at) const noexcept { return chunks_[at / kChunkItems][at % kChunkItems]; }
    std::size_t size() const noexcept { return chunks_.size() * kChunkItems; }

private:
    static constexpr std::size_t kChunkItems = std::size_t{1} << 12;

    std::vector<std::unique_ptr<Item[]>> chunks_;
};

// Each entry is in one of `list_count` lists or unknown. Every operation takes constant time.
template <std::size_t list_count>
class EntryLists {
public:
    bool knows(EntryNumber entry) const noexcept { return entry < nodes_.size() && nodes_[entry].list_after_none != 0; }

    // An unknown entry, as the newest of `list`.
    void add(EntryNumber entry, std::size_t list, std::uint64_t name, std::uint64_t size_bytes) {
        set_facts(entry, name, size_bytes);
        link(entry, list, kNoEntry);
    }

    // An unknown entry, next older than `newer`, in the same list.
    void add_behind(EntryNumber newer, EntryNumber entry, std::uint64_t name, std::uint64_t size_bytes) {
        set_facts(entry, name, size_bytes);
        link(entry, list_of(newer), newer);
    }

    // To the newest place of `list`, whichever list it was in.
    void move(EntryNumber entry, std::size_t list) noexcept {
        unlink(entry);
        link(entry, list, kNoEntry);
    }

    void remove(EntryNumber entry) noexcept {
        unlink(entry);
        nodes_[entry].list_after_none = 0;
    }

    EntryNumber oldest(std::size_t list) const noexcept { return ends_[list].oldest; }
    std::uint64_t bytes(std::size_t list) const noexcept { return ends_[list].bytes; }
    EntryNumber count(std::size_t list) const noexcept { return ends_[list].count; }

    std::size_t list_of(EntryNumber entry) const noexcept { return nodes_[entry].list_after_none - std::size_t{1}; }
    std::uint64_t name(EntryNumber entry) const noexcept { return nodes_[entry].name; }
    std::uint64_t size_bytes(EntryNumber entry) const noexcept { return nodes_[entry].size_bytes; }

    // A small number for the policy's use; 0 for a new entry.
    std::uint8_t mark(EntryNumber entry) const noexcept { return nodes_[entry].mark; }
    void set_mark(EntryNumber entry, std::uint8_t mark) noexcept { nodes_[entry].mark = mark; }

private:
    static constexpr std::uint64_t kSizeMask = (std::uint64_t{1} << 48) - 1;

    struct Node {
        EntryNumber newer = kNoEntry;
        EntryNumber older = kNoEntry;
        std::uint64_t name = 0;
        std::uint64_t size_bytes : 48 = 0;
        std::uint64_t list_after_none : 8 = 0;  // 0: in none
        std::uint64_t mark : 8 = 0;
    };
    static_assert(sizeof(Node) == 24, "what eviction_policy.hpp allows an entry");

    struct Ends {
        EntryNumber newest = kNoEntry;
        EntryNumber oldest = kNoEntry;
        EntryNumber count = 0;
        std::uint64_t bytes = 0;
    };

    void set_facts(EntryNumber entry, std::uint64_t name, std::uint64_t size_bytes) {
        Node& node = nodes_.grow_to(entry);
        node.name = name;
        node.size_bytes = size_bytes & kSizeMask;
        node.mark = 0;
    }

    void link(EntryNumber entry, std::size_t list, EntryNumber newer) noexcept {
        Node& node = nodes_[entry];
        Ends& ends = ends_[list];
        node.newer = newer;
        node.older = newer == kNoEntry ? ends.newest : nodes_[newer].older;
        node.list_after_none = static_cast<std::uint8_t>(list + 1);
        (node.newer == kNoEntry ? ends.newest : nodes_[node.newer].older) = entry;
        (node.older == kNoEntry ? ends.oldest : nodes_[node.older].newer) = entry;
        ends.bytes += node.size_bytes;
        ends.count += 1;
    }

    void unlink(EntryNumber entry) noexcept {
        const Node& node = nodes_[entry];
        Ends& ends = ends_[list_of(entry)];
        (node.newer == kNoEntry ? ends.newest : nodes_[node.newer].older) = node.older;
        (node.older == kNoEntry ? ends.oldest : nodes_[node.older].newer) = node.newer;
        ends.bytes -= node.size_bytes;
        ends.count -= 1;
    }

    ChunkedArray<Node> nodes_;
    std::array<Ends, list_count> ends_;
};

}  // namespace kvo
