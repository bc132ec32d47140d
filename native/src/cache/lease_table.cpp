#include "cache/lease_table.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/memory_order.hpp"

namespace kvo {
namespace {

constexpr LeaseId make_id(std::uint32_t generation, std::uint32_t node) {
    return (static_cast<LeaseId>(generation) << 32) | node;
}
constexpr std::uint32_t node_of(LeaseId id) { return static_cast<std::uint32_t>(id); }

}  // namespace

LeaseTable::LeaseTable(const IndexView& view, Reserve reserve) : view_(view), reserve_(std::move(reserve)) {}

Result<LeaseId> LeaseTable::open(std::uint32_t session, std::span<const EntryNumber> entries) {
    assert(!entries.empty());
    const std::lock_guard lock(mutex_);
    std::uint32_t next = kNoNode;
    // Nodes are filled from the last to the first: the list is whole before its first node gets the id that makes it a
    // lease.
    for (std::size_t i = count_nodes(entries.size()); i-- > 0;) {
        const std::optional<std::uint32_t> taken = take_node();
        if (!taken) {
            free_chain(next);
            return Status(Code::failed, "the index has no room for another lease");
        }
        LeaseNode& node = view_.lease_nodes[*taken];
        const auto part =
            entries.subspan(i * LeaseNode::kCapacity,
                            std::min<std::size_t>(LeaseNode::kCapacity, entries.size() - i * LeaseNode::kCapacity));
        std::ranges::copy(part, node.entries.begin());
        node.count = static_cast<std::uint32_t>(part.size());
        node.session = session;
        node.next = next;
        next = *taken;
    }
    LeaseNode& first = view_.lease_nodes[next];
    const LeaseId id = make_id(++first.generation == 0 ? ++first.generation : first.generation, next);
    first.id.store(id, kRelease);
    ++lease_count_;
    return id;
}

bool LeaseTable::close(LeaseId id, std::uint32_t session, std::vector<EntryNumber>& entries) {
    const std::lock_guard lock(mutex_);
    if (node_of(id) >= node_count_ || id == 0) {
        return false;
    }
    LeaseNode& first = view_.lease_nodes[node_of(id)];
    if (first.id.load(kRelaxed) != id || first.session != session) {
        return false;
    }
    for (std::uint32_t number = node_of(id); number != kNoNode; number = view_.lease_nodes[number].next) {
        const LeaseNode& node = view_.lease_nodes[number];
        entries.insert(entries.end(), node.entries.begin(), node.entries.begin() + node.count);
    }
    first.id.store(0, kRelease);
    free_chain(node_of(id));
    --lease_count_;
    return true;
}

std::vector<LeaseId> LeaseTable::list(std::uint32_t session) const {
    const std::lock_guard lock(mutex_);
    std::vector<LeaseId> leases;
    for (std::uint32_t number = 0; number < node_count_; ++number) {
        const LeaseNode& node = view_.lease_nodes[number];
        if (const LeaseId id = node.id.load(kRelaxed); id != 0 && node.session == session) {
            leases.push_back(id);
        }
    }
    return leases;
}

void LeaseTable::adopt(const std::function<bool(std::uint32_t, std::span<const EntryNumber>)>& visit) {
    const std::lock_guard lock(mutex_);
    node_count_ = std::min(view_.header->lease_node_count.load(kRelaxed),
                           static_cast<std::uint32_t>(view_.regions.lease_nodes.item_limit));
    std::vector<bool> is_used(node_count_);
    std::vector<EntryNumber> entries;
    std::vector<std::uint32_t> chain;
    lease_count_ = 0;
    for (std::uint32_t number = 0; number < node_count_; ++number) {
        LeaseNode& node = view_.lease_nodes[number];
        const LeaseId id = node.id.load(kRelaxed);
        if (id == 0) {
            continue;
        }
        const std::uint32_t session = node.session;
        if (node_of(id) != number || !read_chain(number, is_used, entries, chain) || !visit(session, entries)) {
            node.id.store(0, kRelease);
            continue;
        }
        for (const std::uint32_t link : chain) {
            is_used[link] = true;
        }
        ++lease_count_;
    }
    free_nodes_.clear();
    for (std::uint32_t number = node_count_; number-- > 0;) {
        if (!is_used[number]) {
            free_nodes_.push_back(number);
        }
    }
}

std::uint64_t LeaseTable::count() const {
    const std::lock_guard lock(mutex_);
    return lease_count_;
}

std::optional<std::uint32_t> LeaseTable::take_node() {
    if (!free_nodes_.empty()) {
        const std::uint32_t number = free_nodes_.back();
        free_nodes_.pop_back();
        return number;
    }
    const Region& region = view_.regions.lease_nodes;
    if (node_count_ == region.item_limit || !reserve_(region, node_count_ + 1).ok()) {
        return std::nullopt;
    }
    const std::uint32_t number = node_count_++;
    view_.header->lease_node_count.store(node_count_, kRelease);
    return number;
}

void LeaseTable::free_chain(std::uint32_t first) {
    for (std::uint32_t number = first; number != kNoNode; number = view_.lease_nodes[number].next) {
        free_nodes_.push_back(number);
    }
}

bool LeaseTable::read_chain(std::uint32_t first, std::vector<bool>& is_used, std::vector<EntryNumber>& entries,
                            std::vector<std::uint32_t>& chain) const {
    entries.clear();
    chain.clear();
    for (std::uint32_t number = first; number != kNoNode;) {
        if (number >= is_used.size() || is_used[number] || chain.size() >= is_used.size()) {
            return false;
        }
        const LeaseNode& node = view_.lease_nodes[number];
        if (node.count == 0 || node.count > LeaseNode::kCapacity || node.session != view_.lease_nodes[first].session) {
            return false;
        }
        entries.insert(entries.end(), node.entries.begin(), node.entries.begin() + node.count);
        chain.push_back(number);
        number = node.next;
    }
    return true;
}

}  // namespace kvo
