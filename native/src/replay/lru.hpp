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

}  // namespace kvo
