#include "cache/tenant_table.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace kvo {

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
}

Result<TenantNumber> TenantTable::open(const std::string& name, std::uint64_t quota_bytes) {
    if (name.empty() || name.size() >= records_->name.size() || name.find('\0') != std::string::npos) {
        return Status(Code::invalid, "a tenant's name has 1 to " + std::to_string(records_->name.size() - 1) +
                                         " bytes and no zero among them");
    }
    const auto known = std::ranges::find(tenants_, name, &Tenant::name);
    if (known != tenants_.end()) {
        if ((known->quota_bytes == 0) != (quota_bytes == 0)) {
            return Status(Code::invalid, "tenant '" + name + "' cannot get or lose its quota while the cache runs");
        }
        known->quota_bytes = quota_bytes;
        const auto number = static_cast<TenantNumber>(known - tenants_.begin());
        records_[number].quota_bytes = quota_bytes;
        return number;
    }
    // Whoever had a number that is nobody's has no block any more.
    const auto unused =
        std::find_if(tenants_.begin() + 1, tenants_.end(), [](const Tenant& tenant) { return tenant.name.empty(); });
    const auto number = static_cast<TenantNumber>(unused - tenants_.begin());
    if (number == kTenantLimit) {
        return Status(Code::failed, "there are " + std::to_string(kTenantLimit) + " tenants, more are not served");
    }
    Tenant tenant = make(name, quota_bytes);
    tenants_.resize(std::max<std::size_t>(tenants_.size(), number + std::size_t{1}));
    tenants_[number] = std::move(tenant);
    records_[number].quota_bytes = quota_bytes;
    records_[number].name[name.size()] = 0;
    // From the last byte to the first: the record is valid once the first one stands.
    for (std::size_t i = name.size(); i-- > 0;) {
        records_[number].name[i] = name[i];
        std::atomic_signal_fence(std::memory_order_release);
    }
    return number;
}

TenantTable::Tenant TenantTable::make(const std::string& name, std::uint64_t quota_bytes) {
    Tenant tenant{.name = name, .quota_bytes = quota_bytes};
    if (quota_bytes != 0) {
        tenant.policy = policies_.size();
        policies_.push_back(make_policy_(bounds_));
    }
    return tenant;
}

std::vector<TenantTable::Usage> TenantTable::usage() const {
    std::vector<Usage> usage;
    for (const Tenant& tenant : tenants_) {
        usage.push_back({tenant.name, tenant.quota_bytes, tenant.used_bytes});
    }
    return usage;
}

std::size_t TenantTable::choose_over_quota(std::uint64_t spent) {
    std::size_t chosen = kNoPolicy;
    double furthest = 1.0;
    for (const Tenant& tenant : tenants_) {
        if (tenant.quota_bytes == 0 || tenant.used_bytes <= tenant.quota_bytes || (spent >> tenant.policy & 1) != 0) {
            continue;
        }
        const double share = static_cast<double>(tenant.used_bytes) / static_cast<double>(tenant.quota_bytes);
        if (share > furthest && policies_[tenant.policy]->choose_victim() != kNoEntry) {
            furthest = share;
            chosen = tenant.policy;
        }
    }
    return chosen;
}

}  // namespace kvo
