// Adaptive replacement (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003), in bytes:
// one list of entries that came once, one of those that came or were used again, and of both the names that left
// last. A name that comes back moves the border towards the list it was missed in.
#pragma once

#include "evict/entry_lists.hpp"
#include "evict/eviction_policy.hpp"
#include "replay/ghost_list.hpp"

namespace kvo {

class ArcPolicy final : public EvictionPolicy {
public:
    explicit ArcPolicy(PolicyBounds bounds)
        : capacity_bytes_(bounds.capacity_bytes),
          once_ghosts_(bounds.entry_limit / 2),
          again_ghosts_(bounds.entry_limit - bounds.entry_limit / 2) {}

    void admit(const Admission& admission) override;
    void touch(std::span<const EntryNumber> entries) override;
    EntryNumber choose_victim() override;
    void keep(EntryNumber entry) override;
    void remove(EntryNumber entry, bool was_evicted) override;

    EntryNumber ghost_count() const noexcept { return once_ghosts_.count() + again_ghosts_.count(); }
    std::uint64_t once_target_bytes() const noexcept { return once_target_bytes_; }

private:
    enum List : std::size_t { kOnce, kAgain, kLists };

    bool learn(std::uint64_t name);
    void trim_ghosts();

    std::uint64_t capacity_bytes_;
    std::uint64_t once_target_bytes_ = 0;
    GhostList once_ghosts_;
    GhostList again_ghosts_;
    EntryLists<kLists> lists_;
    EntryNumber kept_ = 0;  // since something was used or came; all of them are in the second list
};

}  // namespace kvo
