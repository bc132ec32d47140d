#include "cache/namespace_table.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace kvo {
namespace {

Reuse reuse_of(BoundaryRule rule) {
    switch (rule) {
        case BoundaryRule::window:
        case BoundaryRule::chunk:
            return Reuse::window;
        case BoundaryRule::exact:
            return Reuse::exact;
        default:
            return Reuse::prefix;
    }
}

std::unique_ptr<Namespace> derive(std::uint32_t number, const Fingerprint& fingerprint, Geometry geometry) {
    auto derived = std::make_unique<Namespace>();
    derived->number = number;
    derived->fingerprint = fingerprint;
    const auto& groups = geometry.groups;
    const auto anchor = std::ranges::find(groups, BoundaryRule::prefix, &GroupGeometry::rule);
    for (std::size_t i = 0; i < groups.size(); ++i) {
        GroupFacts facts;
        facts.reuse = reuse_of(groups[i].rule);
        facts.slot_bytes = groups[i].slot_bytes();
        const bool is_anchored = groups[i].rule != BoundaryRule::prefix && anchor != groups.end();
        facts.anchor = static_cast<std::uint32_t>(is_anchored ? static_cast<std::size_t>(anchor - groups.begin()) : i);
        if (groups[i].window != 0) {
            // Far enough from the beginning that the window is whole.
            const std::uint64_t far = std::uint64_t{groups[i].block_size} * groups[i].window;
            const BlockRange range = needed_blocks(groups[i], 0, groups[i].rule == BoundaryRule::chunk ? far - 1 : far);
            facts.window_blocks = static_cast<std::uint32_t>(std::max<std::uint64_t>(range.count(), 1));
        }
        derived->needs_state = derived->needs_state || facts.reuse == Reuse::exact;
        derived->has_shards = derived->has_shards || groups[i].shards > 1;
        derived->groups.push_back(facts);
    }
    derived->geometry = std::move(geometry);
    return derived;
}

}  // namespace

NamespaceTable::NamespaceTable(const IndexView& view, Reserve reserve) : view_(view), reserve_(std::move(reserve)) {}

Result<std::uint32_t> NamespaceTable::open(const Fingerprint& fingerprint, const Geometry& geometry) {
    if (Status status = check(geometry); !status.ok()) {
        return status;
    }
    const std::lock_guard lock(mutex_);
    for (const auto& known : owned_) {
        if (known->fingerprint == fingerprint) {
            if (known->geometry == geometry) {
                return known->number;
            }
            return Status(Code::invalid, "the identity is known with another geometry of its groups");
        }
    }
    const std::uint32_t number = choose_number();
    if (number == kNamespaceLimit) {
        return Status(Code::failed,
                      "there are " + std::to_string(kNamespaceLimit) + " identities, more are not served");
    }
    if (Status status = reserve_(view_.regions.namespaces, number + 1); !status.ok()) {
        return status;
    }
    // Nobody's as long as it is not whole.
    NamespaceRecord& record = view_.namespaces[number];
    const std::atomic_ref<std::uint32_t> group_count(record.group_count);
    group_count.store(0, std::memory_order_release);
    record.hash_block_size = geometry.hash_block_size;
    record.fingerprint = fingerprint;
    for (std::size_t i = 0; i < geometry.groups.size(); ++i) {
        const GroupGeometry& group = geometry.groups[i];
        record.groups[i] = {group.record_bytes,
                            group.block_size,
                            group.window,
                            group.shards,
                            static_cast<std::uint8_t>(group.rule),
                            {}};
    }
    group_count.store(static_cast<std::uint32_t>(geometry.groups.size()), std::memory_order_release);
    view_.header->namespace_count.store(std::max(number + 1, count()), std::memory_order_release);
    publish(number, fingerprint, geometry);
    return number;
}

const Namespace* NamespaceTable::find(std::uint32_t number) const noexcept {
    return number < count() ? by_number_[number].load(std::memory_order_acquire) : nullptr;
}

void NamespaceTable::adopt() {
    const std::lock_guard lock(mutex_);
    const std::uint32_t end = std::min(view_.header->namespace_count.load(std::memory_order_acquire), kNamespaceLimit);
    for (std::uint32_t number = 0; number < end; ++number) {
        if (find(number) != nullptr) {
            continue;
        }
        NamespaceRecord& record = view_.namespaces[number];
        const std::uint32_t group_count =
            std::atomic_ref<std::uint32_t>(record.group_count).load(std::memory_order_acquire);
        if (group_count == 0) {
            continue;
        }
        if (group_count > kGroupLimit) {
            break;
        }
        Geometry geometry{.hash_block_size = record.hash_block_size, .groups = {}};
        for (std::uint32_t i = 0; i < group_count; ++i) {
            const GroupRecord& group = record.groups[i];
            geometry.groups.push_back({.record_bytes = group.record_bytes,
                                       .block_size = group.block_size,
                                       .window = group.window,
                                       .shards = group.shards,
                                       .rule = static_cast<BoundaryRule>(group.rule)});
        }
        if (!check(geometry).ok()) {
            break;
        }
        publish(number, record.fingerprint, std::move(geometry));
    }
}

void NamespaceTable::forget(const std::function<bool(std::uint32_t)>& is_it) {
    const std::lock_guard lock(mutex_);
    std::erase_if(owned_, [&](const std::unique_ptr<const Namespace>& known) {
        if (!is_it(known->number)) {
            return false;
        }
        by_number_[known->number].store(nullptr, std::memory_order_release);
        std::atomic_ref<std::uint32_t>(view_.namespaces[known->number].group_count).store(0, std::memory_order_release);
        known_.fetch_sub(1, std::memory_order_relaxed);
        return true;
    });
}

// The next one, or the first that is nobody's; `kNamespaceLimit`: there is none.
std::uint32_t NamespaceTable::choose_number() const noexcept {
    std::uint32_t number = count();
    if (number == kNamespaceLimit && known() < number) {
        number = 0;
        while (by_number_[number].load(std::memory_order_relaxed) != nullptr) {
            ++number;
        }
    }
    return number;
}

Status NamespaceTable::check(const Geometry& geometry) const {
    if (Status status = check_geometry(geometry); !status.ok()) {
        return status;
    }
    const std::uint64_t segment_bytes = view_.header->segment_bytes;
    for (std::size_t i = 0; i < geometry.groups.size(); ++i) {
        const GroupGeometry& group = geometry.groups[i];
        if (group.record_bytes > segment_bytes / group.shards) {
            return {Code::invalid, "group " + std::to_string(i) + ": " + std::to_string(group.shards) + " records of " +
                                       std::to_string(group.record_bytes) + " bytes do not fit a segment of " +
                                       std::to_string(segment_bytes)};
        }
    }
    return {};
}

void NamespaceTable::publish(std::uint32_t number, const Fingerprint& fingerprint, Geometry geometry) {
    owned_.push_back(derive(number, fingerprint, std::move(geometry)));
    by_number_[number].store(owned_.back().get(), std::memory_order_release);
    known_.fetch_add(1, std::memory_order_relaxed);
    count_.store(std::max(number + 1, count()), std::memory_order_release);
}

}  // namespace kvo
