// The hash table of an index, as its one writer changes it. It grows by one bucket at a time and never moves an entry's
// own memory, so no look-up and no insertion ever waits for a growth.
#pragma once

#include <functional>
#include <vector>

#include "base/status.hpp"
#include "index/lookup.hpp"

namespace kvo {

// Called by the one writer under its lock. Readers look up meanwhile, by lookup.hpp.
class Table {
public:
    // Called when a region needs memory for this many buckets. If it fails, the insertion is refused.
    using Reserve = std::function<Status(const Region&, std::uint64_t item_count)>;

    Table(const IndexView& view, Reserve reserve);

    // Empties the table and leaves few buckets: for a new index, and before an adopted one is refilled.
    Status reset();

    // Inserts an entry, whose key must be in it already. It is refused, and nothing changes, if there is no memory for
    // it, or if its chain is so long, or has so many entries with its tag, that the keys must have been chosen on
    // purpose.
    Status insert(EntryNumber entry);

    // The entries that keep this one out, which was refused because too many keys fall together: as long as it is
    // refused, one more of them has to be erased. They are at most as many as a chain may have.
    std::vector<EntryNumber> list_rivals(EntryNumber entry) const;

    // Asks for the memory where erasing this entry begins.
    void prefetch(EntryNumber entry) const;

    // The entry's key must still be there. An entry that is not in the table is a bug.
    void erase(EntryNumber entry);

    std::uint64_t size() const noexcept { return size_; }

private:
    static constexpr std::uint32_t kFirstBuckets = 64;

    // Full buckets of a chain, and entries with one tag in them, beyond which it gets no more. As a rule a chain has
    // one or two buckets, and no two entries with one tag. A table that has no memory to grow has longer chains, so
    // that both bounds grow with what a chain has on average.
    static constexpr std::uint32_t kChainLimit = 16;
    static constexpr std::uint32_t kAlikeLimit = 16;
    enum class Chain : std::uint8_t { bounded, any };

    std::uint64_t average_chain() const noexcept;
    std::uint64_t alike_limit() const noexcept { return kAlikeLimit + average_chain() / 64; }
    std::uint64_t chain_limit() const noexcept { return kChainLimit + average_chain() / 4; }

    struct Place {
        std::uint32_t bucket;
        std::uint32_t position;
    };

    std::uint64_t mix(EntryNumber entry) const;
    Status put(std::uint32_t first, EntryNumber entry, std::uint8_t tag, Chain chain);
    Result<std::uint32_t> take_overflow();
    void clear_bucket(std::uint32_t number);
    void list_chain(std::uint32_t first);
    void take_out(Place hole);
    void announce_change(std::uint32_t first);
    void split_next();
    void list_leaving(std::uint32_t count);
    void free_chain(std::uint32_t first);

    const IndexView view_;
    const Reserve reserve_;
    std::uint64_t size_ = 0;
    std::uint32_t overflow_used_ = 0;
    std::vector<std::uint32_t> free_overflow_;
    std::vector<std::uint32_t> chain_;  // buckets of the chain that is being changed
    std::vector<Place> leaving_;        // what a split takes out of it
};

}  // namespace kvo
