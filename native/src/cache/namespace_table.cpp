#include "cache/namespace_table.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

namespace kvo {
namespace {

constexpr std::uint64_t kRoundedShare = 32;

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

// Loads a field before the fields that are loaded after it: the writer may be about to write another namespace.
template <typename Number>
Number load(Number& field) {
    return std::atomic_ref(field).load(std::memory_order_acquire);
}

// Records of nearly one size share slots of the largest of them: what a hybrid model's groups then lose by rounding is
// less than what holes between several sizes take of a full pool.
std::uint64_t class_bytes_for(std::uint64_t slot_bytes, const std::vector<GroupGeometry>& groups) {
    std::uint64_t largest = slot_bytes;
    for (const GroupGeometry& group : groups) {
        if (group.slot_bytes() > largest && group.slot_bytes() - slot_bytes <= slot_bytes / kRoundedShare) {
            largest = group.slot_bytes();
        }
    }
    return largest;
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
        facts.class_bytes = class_bytes_for(facts.slot_bytes, groups);
        const bool is_anchored = groups[i].rule != BoundaryRule::prefix && anchor != groups.end();
        facts.anchor = static_cast<std::uint32_t>(is_anchored ? static_cast<std::size_t>(anchor - groups.begin()) : i);
        for (std::uint32_t other = 0; groups[i].rule == BoundaryRule::prefix && other < groups.size(); ++other) {
            if (other != i && groups[other].rule == BoundaryRule::prefix) {
                facts.companions.push_back(other);
            }
        }
        if (groups[i].window != 0) {
            // Far enough from the beginning that the window is whole.
            const std::uint64_t far = std::uint64_t{groups[i].block_size} * groups[i].window;
            const BlockRange range = needed_blocks(groups[i], 0, groups[i].rule == BoundaryRule::chunk ? far - 1 : far);
            facts.window_blocks = static_cast<std::uint32_t>(std::max<std::uint64_t>(range.count(), 1));
        }
        derived->needs_state = derived->needs_state || facts.reuse == Reuse::exact;
        derived->has_shards = derived->has_shards || groups[i].shards > 1;
        derived->groups.push_back(std::move(facts));
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
    const std::uint32_t place = choose_place();
    if (place == kNamespaceLimit) {
        return Status(Code::failed,
                      "there are " + std::to_string(kNamespaceLimit) + " identities, more are not served");
    }
    if (Status status = reserve_(view_.regions.namespaces, place + 1); !status.ok()) {
        return status;
    }
    NamespaceRecord& record = view_.namespaces[place];
    const bool was_given = place < count() && place_of_namespace(record.number) == place;
    const std::uint32_t number = was_given ? next_namespace(record.number) : place;
    // The record belongs to no namespace until it is whole.
    const std::atomic_ref<std::uint32_t> group_count(record.group_count);
    group_count.exchange(0, std::memory_order_acq_rel);
    std::atomic_ref(record.number).store(number, std::memory_order_relaxed);
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
    view_.header->namespace_count.store(std::max(place + 1, count()), std::memory_order_release);
    if (place < count()) {
        free_places_.pop_front();
    }
    publish(number, fingerprint, geometry);
    return number;
}

// Counted before it is looked for, and looked for before the count is: one of both sees the other.
NamespaceUse NamespaceTable::use(std::uint32_t number) const noexcept {
    const std::uint32_t place = place_of_namespace(number);
    std::atomic<std::uint32_t>& uses = uses_[place];
    const bool is_ending = (uses.fetch_add(1, std::memory_order_seq_cst) & kIsEnding) != 0;
    const Namespace* const found = by_place_[place].load(std::memory_order_seq_cst);
    if (is_ending || found == nullptr || found->number != number) {
        uses.fetch_sub(1, std::memory_order_release);
        return {};
    }
    return {&uses, found};
}

void NamespaceTable::adopt() {
    const std::lock_guard lock(mutex_);
    const std::uint32_t end = std::min(view_.header->namespace_count.load(std::memory_order_acquire), kNamespaceLimit);
    for (std::uint32_t place = 0; place < end; ++place) {
        NamespaceRecord& record = view_.namespaces[place];
        const std::atomic_ref<std::uint32_t> group_count_now(record.group_count);
        const std::atomic_ref<std::uint32_t> number_now(record.number);
        const std::uint32_t group_count = group_count_now.load(std::memory_order_acquire);
        const std::uint32_t number = number_now.load(std::memory_order_relaxed);
        if (number >= kNamespaceNumbers || place_of_namespace(number) != place || group_count > kGroupLimit) {
            break;
        }
        if (group_count == 0 || find(number) != nullptr) {
            continue;
        }
        Fingerprint fingerprint;
        std::ranges::transform(record.fingerprint, fingerprint.begin(), load<std::uint8_t>);
        Geometry geometry{.hash_block_size = load(record.hash_block_size), .groups = {}};
        for (std::uint32_t i = 0; i < group_count; ++i) {
            GroupRecord& group = record.groups[i];
            geometry.groups.push_back({.record_bytes = load(group.record_bytes),
                                       .block_size = load(group.block_size),
                                       .window = load(group.window),
                                       .shards = load(group.shards),
                                       .rule = static_cast<BoundaryRule>(load(group.rule))});
        }
        if (group_count_now.load(std::memory_order_relaxed) != group_count ||
            number_now.load(std::memory_order_relaxed) != number) {
            continue;  // it is being written for another
        }
        if (!check(geometry).ok()) {
            break;
        }
        leave(place);
        publish(number, fingerprint, std::move(geometry));
    }
    // A writer's successor goes on with the numbers of places that are free.
    const std::uint32_t sound = std::max(end, count());
    count_.store(sound, std::memory_order_release);
    free_places_.clear();
    for (std::uint32_t place = 0; place < sound; ++place) {
        if (by_place_[place].load(std::memory_order_relaxed) == nullptr) {
            free_places_.push_back(place);
        }
    }
}

// Frees the place's former namespace once the calls that use it have ended. Those calls wait for nothing.
void NamespaceTable::leave(std::uint32_t place) {
    if (by_place_[place].load(std::memory_order_relaxed) == nullptr) {
        return;
    }
    const Namespace* const former = by_place_[place].exchange(nullptr, std::memory_order_seq_cst);
    while (uses_[place].load(std::memory_order_seq_cst) != 0) {
        std::this_thread::yield();
    }
    std::erase_if(owned_, [&](const std::unique_ptr<const Namespace>& known) { return known.get() == former; });
    known_.fetch_sub(1, std::memory_order_relaxed);
}

std::uint32_t NamespaceTable::shards_of(Space space) const noexcept {
    const NamespaceUse used = use(namespace_of(space));
    return used && group_of(space) < used->groups.size() ? used->geometry.groups[group_of(space)].shards : 0;
}

std::vector<std::uint32_t> NamespaceTable::forget(const IsIt& is_it) {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint32_t> forgotten;
    std::erase_if(owned_, [&](const std::unique_ptr<const Namespace>& known) {
        const std::uint32_t place = place_of_namespace(known->number);
        std::uint32_t nobody = 0;
        if (!is_it(known->number) || !uses_[place].compare_exchange_strong(nobody, kIsEnding)) {
            return false;
        }
        // A call that has ended in between may have made it another's.
        const bool is_over = is_it(known->number);
        if (is_over) {
            by_place_[place].store(nullptr, std::memory_order_seq_cst);
        }
        uses_[place].fetch_sub(kIsEnding, std::memory_order_seq_cst);
        if (!is_over) {
            return false;
        }
        std::atomic_ref<std::uint32_t>(view_.namespaces[place].group_count).store(0, std::memory_order_release);
        free_places_.push_back(place);
        forgotten.push_back(known->number);
        known_.fetch_sub(1, std::memory_order_relaxed);
        return true;
    });
    return forgotten;
}

std::vector<std::uint32_t> NamespaceTable::list() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint32_t> numbers;
    for (const auto& known : owned_) {
        numbers.push_back(known->number);
    }
    return numbers;
}

// The next one, or the first that was given back; `kNamespaceLimit`: there is none.
std::uint32_t NamespaceTable::choose_place() const noexcept {
    const std::uint32_t next = count();
    return next == kNamespaceLimit && !free_places_.empty() ? free_places_.front() : next;
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
    const std::uint32_t place = place_of_namespace(number);
    owned_.push_back(derive(number, fingerprint, std::move(geometry)));
    by_place_[place].store(owned_.back().get(), std::memory_order_release);
    known_.fetch_add(1, std::memory_order_relaxed);
    count_.store(std::max(place + 1, count()), std::memory_order_release);
}

}  // namespace kvo
