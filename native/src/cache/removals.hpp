// Removals: readable entries lose their names because memory is wanted, or because a caller asks for it. Those that are
// leased stay until they are released. Identities that have none left are forgotten.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/cache_state.hpp"

namespace kvo {

// Safe to call from any thread. Entries go under the writer's lock, in parts short enough for others to get in between.
class Removals {
public:
    // `state` outlives it.
    Removals(CacheState& state, std::uint64_t capacity_bytes) : state_(state), capacity_bytes_(capacity_bytes) {}

    // Forgets these entries, because their bytes are not to be trusted. Leases on them stay good until released.
    std::size_t invalidate(Space space, std::span<const std::uint8_t> hashes);
    // Evicts until this many bytes more are free of use, or nothing (found in a bounded search) can be; how many were.
    std::uint64_t evict(std::uint64_t bytes);
    // Forgets all readable entries of a namespace.
    std::size_t clear(std::uint32_t name_space);
    // Forgets identities without blocks, except `kept` and those that a call goes on with, and returns which ones were
    // forgotten. Their numbers name nothing from then on: a call that still uses one finds nothing, and leaves nothing.
    std::vector<std::uint32_t> forget_namespaces(std::span<const std::uint32_t> kept);

    // For a thread that never waits for the writer's lock: the work under it is done at once if the lock is free, else
    // soon by the thread that holds it, in the order of the calls.
    void leave_invalidate(Space space, std::span<const std::uint8_t> hashes);
    // Whether a tier below memory has these blocks, too, where they are readable: then there is less to lose by
    // evicting them. As long as there are hashes; left in the same way.
    void leave_tier_notes(Space space, std::span<const std::uint8_t> hashes, std::span<const std::uint8_t> has);
    // Evicts all readable entries of these namespaces, while other calls go on. False: an eviction is not over yet; if
    // it is an earlier one, these namespaces are not evicted until it is called again.
    bool leave_evict(std::span<const std::uint32_t> name_spaces);
    // Some are being evicted so, and no others can be.
    bool is_evicting() const noexcept { return is_evicting_.load(); }

private:
    std::size_t invalidate_part(Space space, std::span<const std::uint8_t> hashes);
    void evict_all(const std::shared_ptr<const std::vector<std::uint32_t>>& by_place, EntryNumber begin);

    CacheState& state_;
    const std::uint64_t capacity_bytes_;
    std::atomic<bool> is_evicting_ = false;  // identities
};

}  // namespace kvo
