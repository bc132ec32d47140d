#include "cache/tenant_table.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/memory_order.hpp"

namespace kvo {

void OwnNumbers::admit(const Admission& admission) {
    EntryNumber place = count_;
    if (free_.empty()) {
        ++count_;
    } else {
        place = free_.back();
        free_.pop_back();
    }
    entries_.grow_to(place) = admission.entry;
    places_->grow_to(admission.entry) = place;
    Admission own = admission;
    own.entry = place;
    own.parent = place_of(admission.parent);
    policy_->admit(own);
}

void OwnNumbers::touch(std::span<const EntryNumber> entries) {
    touched_.clear();
    for (const EntryNumber entry : entries) {
        touched_.push_back(place_of(entry));
    }
    policy_->touch(touched_);
}

void OwnNumbers::spare(EntryNumber entry) {
    if (const EntryNumber place = place_of(entry); place != kNoEntry) {
        policy_->spare(place);
    }
}

void OwnNumbers::note_tier(EntryNumber entry, bool has) {
    if (const EntryNumber place = place_of(entry); place != kNoEntry) {
        policy_->note_tier(place, has);
    }
}

void OwnNumbers::remove(EntryNumber entry, bool was_evicted) {
    const EntryNumber place = place_of(entry);
    policy_->remove(place, was_evicted);
    entries_[place] = kNoEntry;
    free_.push_back(place);
}

EntryNumber OwnNumbers::place_of(EntryNumber entry) const noexcept {
    if (entry == kNoEntry || entry >= places_->size()) {
        return kNoEntry;
    }
    const EntryNumber place = (*places_)[entry];
    return place < count_ && entries_[place] == entry ? place : kNoEntry;
}

TenantTable TenantTable::create(TenantRecord* records, const MakePolicy& make_policy, const PolicyBounds& bounds,
                                const std::optional<std::vector<TenantTerms>>& wanted) {
    TenantTable table(records, make_policy, bounds);
    for (std::uint32_t number = 1; number < kTenantLimit; ++number) {
        TenantRecord& record = records[number];
        const std::string name(record.name.data(), strnlen(record.name.data(), record.name.size()));
        const bool is_double = std::ranges::find(table.tenants_, name, &Tenant::name) != table.tenants_.end();
        if (wanted && !is_double) {
            const auto terms = std::ranges::find(*wanted, name, &TenantTerms::name);
            record.name.front() = terms == wanted->end() ? '\0' : record.name.front();
            record.quota_bytes = terms == wanted->end() ? 0 : terms->quota_bytes;
        }
        if (is_double || record.name.front() == 0) {
            table.tenants_.push_back({});
            continue;
        }
        table.tenants_.push_back(table.make(name, record.quota_bytes));
        table.tell(number, record.quota_bytes);
    }
    while (table.tenants_.size() > 1 && table.tenants_.back().name.empty()) {
        table.tenants_.pop_back();
    }
    return table;
}

TenantTable::TenantTable(TenantRecord* records, MakePolicy make_policy, const PolicyBounds& bounds)
    : records_(records), make_policy_(std::move(make_policy)), bounds_(bounds) {
    tenants_.push_back({});
    policies_.push_back(make_policy_(bounds));
    tell(0, 0);
}

Result<TenantNumber> TenantTable::open(const std::string& name, std::uint64_t quota_bytes) {
    if (name.empty() || name.size() >= records_->name.size() || name.find('\0') != std::string::npos) {
        return Status(Code::invalid, "a tenant's name has 1 to " + std::to_string(records_->name.size() - 1) +
                                         " bytes and no zero among them");
    }
    if (auto known = set_quota(name, quota_bytes)) {
        return std::move(*known);
    }
    // The former tenant of an unused number has no block any more.
    const auto unused =
        std::find_if(tenants_.begin() + 1, tenants_.end(), [](const Tenant& tenant) { return tenant.name.empty(); });
    const auto number = static_cast<TenantNumber>(unused - tenants_.begin());
    if (number == kTenantLimit) {
        return Status(Code::failed, "there are " + std::to_string(kTenantLimit) + " tenants, more are not served");
    }
    Tenant tenant = make(name, quota_bytes);
    tenants_.resize(std::max<std::size_t>(tenants_.size(), number + std::size_t{1}));
    tenants_[number] = std::move(tenant);
    tell(number, quota_bytes);
    records_[number].quota_bytes = quota_bytes;
    records_[number].name[name.size()] = 0;
    // Written from the last byte to the first: the record is valid once the first one stands.
    for (std::size_t i = name.size(); i-- > 0;) {
        records_[number].name[i] = name[i];
        std::atomic_signal_fence(std::memory_order_release);
    }
    return number;
}

std::optional<Result<TenantNumber>> TenantTable::set_quota(const std::string& name, std::uint64_t quota_bytes) {
    const std::lock_guard lock(told_->mutex);
    const auto known = name.empty() ? told_->names.end() : std::ranges::find(told_->names, name);
    if (known == told_->names.end()) {
        return std::nullopt;
    }
    const auto number = static_cast<TenantNumber>(known - told_->names.begin());
    if ((quota_of(number) == 0) != (quota_bytes == 0)) {
        return Status(Code::invalid, "tenant '" + name + "' cannot get or lose its quota while the cache runs");
    }
    told_->quota_bytes[number].store(quota_bytes, std::memory_order_relaxed);
    std::atomic_ref(records_[number].quota_bytes).store(quota_bytes, std::memory_order_relaxed);
    return number;
}

bool TenantTable::hold(TenantNumber tenant, std::uint64_t bytes, std::uint64_t entries) noexcept {
    told_->all_held_bytes.fetch_add(bytes, kRelaxed);
    told_->all_held_entries.fetch_add(entries, kRelaxed);
    const std::uint64_t held = told_->held_bytes[tenant].fetch_add(bytes, kRelaxed) + bytes;
    const std::uint64_t quota = quota_of(tenant);
    return quota == 0 || held <= quota;
}

bool TenantTable::let_go(TenantNumber tenant, std::uint64_t bytes, std::uint64_t entries) noexcept {
    return hold(tenant, ~bytes + 1, ~entries + 1);
}

// Publishes the tenant's name and quota, so that other threads can ask for them.
void TenantTable::tell(std::size_t number, std::uint64_t quota_bytes) {
    const std::lock_guard lock(told_->mutex);
    told_->names.resize(std::max(told_->names.size(), number + 1));
    told_->names[number] = tenants_[number].name;
    told_->quota_bytes[number].store(quota_bytes, std::memory_order_relaxed);
}

TenantTable::Tenant TenantTable::make(const std::string& name, std::uint64_t quota_bytes) {
    Tenant tenant{.name = name};
    if (quota_bytes != 0) {
        tenant.policy = policies_.size();
        policies_.push_back(std::make_unique<OwnNumbers>(make_policy_(bounds_), places_));
    }
    return tenant;
}

std::vector<TenantTable::Usage> TenantTable::usage() const {
    const std::lock_guard lock(told_->mutex);
    std::vector<Usage> usage;
    for (std::size_t number = 0; number < told_->names.size(); ++number) {
        usage.push_back({told_->names[number], quota_of(number), used_by(number)});
    }
    return usage;
}

std::size_t TenantTable::choose_over_quota(std::uint64_t spent) {
    std::size_t chosen = kNoPolicy;
    double furthest = 1.0;
    for (std::size_t number = 0; number < tenants_.size(); ++number) {
        const std::size_t policy = tenants_[number].policy;
        if (!is_over_quota(static_cast<TenantNumber>(number)) || (spent >> policy & 1) != 0) {
            continue;
        }
        const double share = static_cast<double>(used_by(number)) / static_cast<double>(quota_of(number));
        if (share > furthest && policies_[policy]->choose_victim() != kNoEntry) {
            furthest = share;
            chosen = policy;
        }
    }
    return chosen;
}

}  // namespace kvo
