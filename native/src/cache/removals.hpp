// Removals: readable entries lose their names because memory is wanted, or because somebody says so. Those that are
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
    // Identities without blocks are forgotten, but for these and for those that a call goes on with; which ones were.
    // Their numbers are nobody's from then on: whoever still says one finds nothing, and leaves nothing.
    std::vector<std::uint32_t> forget_namespaces(std::span<const std::uint32_t> kept);

    // For a thread that never waits for the writer's lock: what is done under it is done at once where nobody has it,
    // else by whoever has it, soon and in this order.
    void leave_invalidate(Space space, std::span<const std::uint8_t> hashes);
    // Whether a tier below memory has these blocks, too, where they are readable: then there is less to lose by
    // evicting them. As long as there are hashes; left in the same way.
    void leave_tier_notes(Space space, std::span<const std::uint8_t> hashes, std::span<const std::uint8_t> has);
    // All readable entries of these namespaces are evicted, beside whatever others do; false: it is not over yet, and
    // these wait until it is asked for again.
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
