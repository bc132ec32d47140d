// Leases, as lists of entry numbers in the index file, so that they outlive the process that gave them.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "index/index_view.hpp"

namespace kvo {

using LeaseId = std::uint64_t;  // never 0; an id is never used twice within 2^32 leases of one node

// Safe to call from any thread. It counts nothing in the entries: a caller that opens a lease has pinned them before,
// and one that closes a lease unpins them after. If the process dies in between, the lists say which pins are true.
class LeaseTable {
public:
    using Reserve = std::function<Status(const Region&, std::uint64_t item_count)>;

    LeaseTable(const IndexView& view, Reserve reserve);

    // Nodes of the list of a lease with so many entries.
    static constexpr std::uint64_t count_nodes(std::uint64_t entries) {
        return (entries + LeaseNode::kCapacity - 1) / LeaseNode::kCapacity;
    }

    // The entries must not be empty. A fault says that there is no room for the list.
    Result<LeaseId> open(std::uint32_t session, std::span<const EntryNumber> entries);

    // Ends a lease and appends its entries to `entries`; false if this session has no such lease (any more).
    bool close(LeaseId id, std::uint32_t session, std::vector<EntryNumber>& entries);

    // All leases of a session.
    std::vector<LeaseId> list(std::uint32_t session) const;

    // Reads the lists that a dead process left. Calls `visit(session, entries)` for each lease; a lease for which it
    // is false, or whose list makes no sense, is dropped.
    void adopt(const std::function<bool(std::uint32_t session, std::span<const EntryNumber>)>& visit);

    // Calls `visit(entry)` for each entry of an active lease.
    template <typename Visit>
    void each_entry(LeaseId id, Visit visit) const {
        const std::lock_guard lock(mutex_);
        for (auto number = static_cast<std::uint32_t>(id); number != kNoNode; number = view_.lease_nodes[number].next) {
            const LeaseNode& node = view_.lease_nodes[number];
            for (std::uint32_t i = 0; i < node.count; ++i) {
                visit(node.entries[i]);
            }
        }
    }

    std::uint64_t count() const;

private:
    std::optional<std::uint32_t> take_node();
    void free_chain(std::uint32_t first);
    bool read_chain(std::uint32_t first, std::vector<bool>& is_used, std::vector<EntryNumber>& entries,
                    std::vector<std::uint32_t>& chain) const;

    const IndexView view_;
    const Reserve reserve_;
    mutable std::mutex mutex_;
    std::uint32_t node_count_ = 0;  // nodes that were ever used
    std::vector<std::uint32_t> free_nodes_;
    std::uint64_t lease_count_ = 0;
};

}  // namespace kvo
