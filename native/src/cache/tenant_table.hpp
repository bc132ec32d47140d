// The tenants that share a pool: each one's use and quota, and the order in which their entries are evicted.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "evict/entry_lists.hpp"
#include "evict/eviction_policy.hpp"
#include "index/layout.hpp"

namespace kvo {

// A policy for some entries of a pool, which it gives numbers of its own. So its memory grows with the number of its
// entries, not with their highest number in the pool.
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
    double value_of(EntryNumber entry) const override { return policy_->value_of(place_of(entry)); }
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

using TenantNumber = std::uint16_t;

// A tenant that shares a pool; `quota_bytes` 0: no share of its own.
struct TenantTerms {
    std::string name;
    std::uint64_t quota_bytes = 0;
};

// Under the writer's lock, but for `set_quota`, `usage`, and what says how much is held. Tenants without a quota share
// one policy; one with a quota has its own, so that it can lose its own entries first.
class TenantTable {
public:
    static constexpr std::size_t kPolicyLimit = kTenantLimit;

    // Tenants in the records are there at once, with the quotas in the records; if `wanted` is given, only those that
    // it names. The records of the others are emptied: their numbers belong to no tenant, and go only to tenants that
    // are opened later.
    static TenantTable create(TenantRecord* records, const MakePolicy& make_policy, const PolicyBounds& bounds,
                              const std::optional<std::vector<TenantTerms>>& wanted = {});

    // The number of this tenant, whose name has 1 to 55 bytes; `quota_bytes` 0: no share of its own. Calling again
    // changes the quota, but not whether there is one.
    Result<TenantNumber> open(const std::string& name, std::uint64_t quota_bytes);
    // The same of a tenant that is known; none: it is not. From any thread.
    std::optional<Result<TenantNumber>> set_quota(const std::string& name, std::uint64_t quota_bytes);

    bool is_known(TenantNumber tenant) const noexcept {
        return tenant == 0 || (tenant < tenants_.size() && !tenants_[tenant].name.empty());
    }
    EvictionPolicy& policy_of(TenantNumber tenant) { return *policies_[tenants_[tenant].policy]; }
    const EvictionPolicy& policy_of(TenantNumber tenant) const { return *policies_[tenants_[tenant].policy]; }
    bool has_one_policy() const noexcept { return policies_.size() == 1; }
    bool share_policy(TenantNumber tenant, TenantNumber other) const noexcept {
        return tenants_[tenant].policy == tenants_[other].policy;
    }

    void add_bytes(TenantNumber tenant, std::uint64_t bytes) {
        std::atomic<std::uint64_t>& used = told_->used_bytes[tenant];
        used.store(used.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
    }
    void subtract_bytes(TenantNumber tenant, std::uint64_t bytes) { add_bytes(tenant, ~bytes + 1); }
    bool is_over_quota(TenantNumber tenant) const noexcept {
        const std::uint64_t quota_bytes = quota_of(tenant);
        return quota_bytes != 0 && used_by(tenant) > quota_bytes;
    }

    // Whether an unused entry of `owner` may be evicted for an entry of `wanting`: never if the owner is within its
    // quota, nor if the owner has no quota and `wanting` is over its own.
    bool may_take(TenantNumber wanting, TenantNumber owner) const noexcept {
        return wanting == owner || is_over_quota(owner) || (quota_of(owner) == 0 && !is_over_quota(wanting));
    }

    // Notes that an entry of this tenant is in use from here on (leased, or reserved), so that it cannot be evicted.
    // False: the tenant has more in use than its quota, so that others could not get their memory back. From any
    // thread, and so are the next three.
    bool hold(TenantNumber tenant, std::uint64_t bytes, std::uint64_t entries = 1) noexcept;
    bool let_go(TenantNumber tenant, std::uint64_t bytes, std::uint64_t entries = 1) noexcept;
    std::uint64_t held_bytes() const noexcept { return told_->all_held_bytes.load(std::memory_order_relaxed); }
    std::uint64_t held_entries() const noexcept { return told_->all_held_entries.load(std::memory_order_relaxed); }

    // The policy whose entry is evicted next: of the tenants over their quotas the one furthest over. If there is none,
    // or none of them has anything to lose, the one that all without a quota share. If that has no candidate either,
    // the policy whose candidate was used least recently, as `age(entry)` says; but an entry of a tenant within its
    // quota never goes for a tenant that is over its own or has none. Without `wanting`, everything may go. Policies
    // whose bit is in `spent` are not chosen. kNoPolicy: there is no candidate.
    static constexpr std::size_t kNoPolicy = ~std::size_t{0};
    template <typename Age>
    std::size_t choose_policy(Age age, std::optional<TenantNumber> wanting = {}, std::uint64_t spent = 0) {
        if (has_one_policy()) {
            return spent != 0 || policies_.front()->choose_victim() == kNoEntry ? kNoPolicy : 0;
        }
        if (const std::size_t over = choose_over_quota(spent); over != kNoPolicy) {
            return over;
        }
        if (wanting && is_over_quota(*wanting)) {
            return kNoPolicy;
        }
        if ((spent & 1) == 0 && policies_.front()->choose_victim() != kNoEntry) {
            return 0;
        }
        if (wanting && quota_of(*wanting) == 0) {
            return kNoPolicy;
        }
        std::size_t oldest = kNoPolicy;
        for (std::size_t i = 0; i < policies_.size(); ++i) {
            const EntryNumber candidate = (spent >> i & 1) != 0 ? kNoEntry : policies_[i]->choose_victim();
            if (candidate != kNoEntry &&
                (oldest == kNoPolicy || age(candidate) > age(policies_[oldest]->choose_victim()))) {
                oldest = i;
            }
        }
        return oldest;
    }
    EvictionPolicy& policy(std::size_t number) { return *policies_[number]; }

    struct Usage {
        std::string name;  // empty: clients without a tenant, and unused numbers
        std::uint64_t quota_bytes = 0;
        std::uint64_t used_bytes = 0;
    };
    // Safe to call from any thread.
    std::vector<Usage> usage() const;

private:
    struct Tenant {
        std::string name;
        std::size_t policy = 0;
    };
    // Names, quotas and uses that other threads may ask for and change, by number.
    struct Told {
        mutable std::mutex mutex;  // of the names, which are there for good
        std::vector<std::string> names;
        std::array<std::atomic<std::uint64_t>, kTenantLimit> quota_bytes{};
        std::array<std::atomic<std::uint64_t>, kTenantLimit> used_bytes{};
        std::array<std::atomic<std::uint64_t>, kTenantLimit> held_bytes{};
        std::atomic<std::uint64_t> all_held_bytes = 0;
        std::atomic<std::uint64_t> all_held_entries = 0;
    };

    TenantTable(TenantRecord* records, MakePolicy make_policy, const PolicyBounds& bounds);
    Tenant make(const std::string& name, std::uint64_t quota_bytes);
    void tell(std::size_t number, std::uint64_t quota_bytes);
    std::uint64_t quota_of(std::size_t number) const noexcept {
        return told_->quota_bytes[number].load(std::memory_order_relaxed);
    }
    std::uint64_t used_by(std::size_t number) const noexcept {
        return told_->used_bytes[number].load(std::memory_order_relaxed);
    }
    std::size_t choose_over_quota(std::uint64_t spent);

    TenantRecord* records_;  // by number
    MakePolicy make_policy_;
    PolicyBounds bounds_;
    std::vector<Tenant> tenants_;  // 0: clients without a tenant; another without a name is an unused number
    std::vector<std::unique_ptr<EvictionPolicy>> policies_;  // the first has the pool's numbers, the others their own
    std::shared_ptr<OwnNumbers::Places> places_ = std::make_shared<OwnNumbers::Places>();
    std::unique_ptr<Told> told_ = std::make_unique<Told>();
};

}  // namespace kvo
