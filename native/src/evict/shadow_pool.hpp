// A model of a pool of another size: it has the names that the pool would hold by now, in a policy's order, but no
// records.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "evict/eviction_policy.hpp"

namespace kvo {

// One record of a pool, as far as its place in the order goes.
struct ShadowRecord {
    std::uint64_t name = 0;    // as the policy has it
    std::uint64_t parent = 0;  // name of the nearest one that it depends on and that is followed too; 0: there is none
    std::uint64_t size_bytes = 0;
    std::uint32_t window_blocks = 0;
    std::uint32_t group = 0;
    Reuse reuse = Reuse::prefix;
    bool needs_state = false;
    std::uint64_t state = 0;  // name of the state that ends with this block, of a block that `needs_state`
};

// One thread.
class ShadowPool {
public:
    // Holds `bounds.entry_limit` records and `bounds.capacity_bytes` of them at most.
    ShadowPool(const MakePolicy& make_policy, PolicyBounds bounds);

    // Begins another request. The records that it uses or brings stay until the next request begins.
    void begin_request();
    // Uses a record. Returns whether the pool held it; from now on it does, if it fits.
    bool use(const ShadowRecord& record);
    // Takes in a record that came without a use. If `for_use`, its first use finds it only for that reason, and is no
    // hit.
    void bring(const ShadowRecord& record, bool for_use);
    void remove(std::uint64_t name);

    bool holds(std::uint64_t name) const noexcept { return find(name) != kNoEntry; }
    std::size_t count() const noexcept { return residents_.size() - free_.size(); }
    std::uint64_t used_bytes() const noexcept { return used_bytes_; }

private:
    struct Resident {
        std::uint64_t name = 0;
        std::uint64_t size_bytes = 0;
        std::uint32_t request = 0;  // that used it last; 0: the number is free
        bool is_for_use = false;
    };

    EntryNumber find(std::uint64_t name) const noexcept;
    std::size_t cell_of(std::uint64_t name) const noexcept;
    void put(EntryNumber entry) noexcept;
    void take_out(std::uint64_t name) noexcept;
    void admit(const ShadowRecord& record, bool is_for_use);
    bool make_room(std::uint64_t size_bytes);
    void forget(EntryNumber entry, bool was_evicted);
    void tell_uses();

    PolicyBounds bounds_;
    std::unique_ptr<EvictionPolicy> policy_;
    std::uint64_t used_bytes_ = 0;
    std::vector<Resident> residents_;  // by entry number
    std::vector<EntryNumber> free_;
    std::vector<EntryNumber> cells_;  // by name, open addresses; a power of two, half of them empty at least
    std::uint32_t request_ = 1;
    std::size_t keeps_left_ = 0;     // of this request, before it is taken for larger than the pool
    std::vector<EntryNumber> used_;  // that the policy has not been told of
};

}  // namespace kvo
