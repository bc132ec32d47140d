// A policy for some entries of a pool, which it gives numbers of its own. So its memory grows with the number of its
// entries, not with their highest number in the pool.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "evict/entry_lists.hpp"
#include "evict/eviction_policy.hpp"

namespace kvo {

class OwnNumbers final : public EvictionPolicy {
public:
    // For each entry of the pool, its number in the policy that knows it. All policies of a pool share the array, since
    // each entry belongs to one policy at a time.
    using Places = ChunkedArray<EntryNumber>;

    OwnNumbers(std::unique_ptr<EvictionPolicy> policy, std::shared_ptr<Places> places)
        : policy_(std::move(policy)), places_(std::move(places)) {}

    void expect_admission(std::uint64_t name) const override { policy_->expect_admission(name); }
    void admit(const Admission& admission) override;
    void touch(std::span<const EntryNumber> entries) override;
    void spare(EntryNumber entry) override;
    void note_tier(EntryNumber entry, bool has) override;
    EntryNumber choose_victim() override { return entry_of(policy_->choose_victim()); }
    EntryNumber expect_victim() const override { return entry_of(policy_->expect_victim()); }
    void keep(EntryNumber entry) override { policy_->keep(place_of(entry)); }
    void remove(EntryNumber entry, bool was_evicted) override;

private:
    EntryNumber entry_of(EntryNumber place) const noexcept { return place == kNoEntry ? kNoEntry : entries_[place]; }
    // kNoEntry: the entry is not known here.
    EntryNumber place_of(EntryNumber entry) const noexcept;

    const std::unique_ptr<EvictionPolicy> policy_;
    const std::shared_ptr<Places> places_;
    ChunkedArray<EntryNumber> entries_;  // by place
    EntryNumber count_ = 0;              // places that were ever used
    std::vector<EntryNumber> free_;
    std::vector<EntryNumber> touched_;
};

}  // namespace kvo
