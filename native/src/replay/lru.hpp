// Least recently used: one list. Of the entries that came or were used together, the deeper ones are the older, so
// that parents outlive children.
#pragma once

#include "evict/entry_lists.hpp"
#include "evict/eviction_policy.hpp"

namespace kvo {

class LruPolicy final : public EvictionPolicy {
public:
    void admit(const Admission& admission) override;
    void touch(std::span<const EntryNumber> entries) override;
    EntryNumber choose_victim() override { return lists_.oldest(0); }
    void keep(EntryNumber entry) override { lists_.move(entry, 0); }
    void remove(EntryNumber entry, bool was_evicted) override;

private:
    EntryLists<1> lists_;
};

// Segmented LRU: entries that were used since they came are protected, in half of the bytes; those that were not go
// first. Entries that the protected half cannot hold get a second chance among the others.
class SlruPolicy final : public EvictionPolicy {
public:
    explicit SlruPolicy(PolicyBounds bounds) : protected_limit_bytes_(bounds.capacity_bytes / 2) {}

    void admit(const Admission& admission) override;
    void touch(std::span<const EntryNumber> entries) override;
    EntryNumber choose_victim() override;
    void keep(EntryNumber entry) override;
    void remove(EntryNumber entry, bool was_evicted) override;

private:
    enum List : std::size_t { kProbation, kProtected, kLists };

    void demote_surplus();

    std::uint64_t protected_limit_bytes_;
    EntryLists<kLists> lists_;
};

}  // namespace kvo
