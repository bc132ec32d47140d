// Three queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023): new entries pass a small
// one, a tenth of the bytes; those used twice there move to the main one; of the others only names are remembered,
// and who comes back soon enough goes to the main queue at once.
#pragma once

#include "evict/entry_lists.hpp"
#include "evict/eviction_policy.hpp"
#include "replay/ghost_list.hpp"

namespace kvo {

class S3FifoPolicy final : public EvictionPolicy {
public:
    explicit S3FifoPolicy(PolicyBounds bounds)
        : small_bytes_(bounds.capacity_bytes / 10),
          ghost_bytes_(bounds.capacity_bytes - small_bytes_),
          ghosts_(bounds.entry_limit) {}

    void admit(const Admission& admission) override;
    void touch(std::span<const EntryNumber> entries) override;
    EntryNumber choose_victim() override;
    void keep(EntryNumber entry) override;
    void remove(EntryNumber entry, bool was_evicted) override;

    EntryNumber ghost_count() const noexcept { return ghosts_.count(); }

private:
    enum List : std::size_t { kSmall, kMain, kLists };

    std::uint64_t small_bytes_;
    std::uint64_t ghost_bytes_;
    GhostList ghosts_;
    EntryLists<kLists> lists_;
    EntryNumber kept_ = 0;  // since something was used or came; all of them are in the main queue
};

}  // namespace kvo
