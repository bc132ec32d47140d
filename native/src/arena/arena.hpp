// Keeps track of where each record lies in the pool's segments. It never reads or writes a byte of a segment.
//
// The pool is segments of equal size, each cut into extents. A run of extents serves one record size as a span of
// slots, and are free again as soon as the span's last record is gone.
//
//     allocate ──► slot ──► free                 a hole of that size, or free extents; never evicts
//     can_make_room ──► plan_room ──► finish_move or cancel_move of each move ──► allocate again
//
// When the pool is full, the caller evicts the records that are due, of any size. That leaves holes of sizes that are
// not asked for. Once the holes are large enough together, a plan moves records closer, so that whole extents become
// free for another size. Holes that do not add up to a span of their size stay, and so does a small part of every size,
// so hardly anything moves while the mix of sizes stays the same.
//
// One thread at a time may call it, the cache's writer. No call blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena/room_plan.hpp"
#include "arena/slot_pool.hpp"
#include "arena/span_table.hpp"
#include "base/entry_number.hpp"
#include "base/status.hpp"

namespace kvo {

struct ArenaShape {
    std::uint64_t segment_bytes = 1ULL << 30;
    std::uint64_t extent_bytes = 1ULL << 20;
};

// While moves are planned, their records count in both places.
struct ArenaStats {
    std::uint64_t capacity_bytes = 0;
    std::uint64_t live_records = 0;
    std::uint64_t live_record_bytes = 0;  // as asked for
    std::uint64_t live_slot_bytes = 0;    // with what rounding adds
    std::uint32_t free_extents = 0;
    std::uint32_t longest_free_run = 0;
    std::uint64_t spans = 0;
    std::uint64_t hole_bytes = 0;
    std::uint64_t moved_records = 0;
    std::uint64_t moved_bytes = 0;
};

class Arena {
public:
    // Code::invalid if a segment is not a whole number of extents, or an extent not of disk sectors.
    static Result<Arena> create(ArenaShape shape);

    // Bookkeeping for so many extents in all, so that those that come later need none. Code::invalid: more than 2**31.
    Status reserve(std::uint64_t extents);

    // The next extents of the pool, which lie behind all that came before; a segment may come in parts.
    Status add_extents(std::uint32_t count);
    Status add_segment() { return add_extents(pool_.extents_per_segment); }

    // Withdraws the pool's last segments, from this one on: they get no records any more, and the caller moves or frees
    // those that are there. No plan may be open.
    void withdraw(std::uint32_t segment);
    bool has_withdrawn() const noexcept { return pool_.has_withdrawn(); }
    // The pool ends before those of the withdrawn segments that have no record in them or behind them. Extents that are
    // added later take their place.
    void cut_withdrawn();
    // Takes the others back into use.
    void restore_withdrawn();
    // The class and records of the first span at this withdrawn extent or behind it, whose extent is then the argument;
    // none: there is no other.
    struct WithdrawnSpan {
        ClassNumber number = 0;
        std::vector<std::pair<Slot, EntryNumber>> records;
    };
    std::optional<WithdrawnSpan> find_withdrawn(ExtentNumber& from) const;

    // The size's number, the same for the same size as long as it has records; at most 4096 sizes have them at once.
    // Code::invalid: no segment can hold such a record.
    Result<ClassNumber> class_for(std::uint64_t record_bytes);

    // Returns a slot, or nothing if the size has no hole and no free run of extents is long enough.
    std::optional<Slot> allocate(ClassNumber number, EntryNumber owner);

    // The slot must be allocated, and in no planned move.
    void free(Slot slot);

    // Takes a slot that an entry of an earlier process had. Claims may come in any order; afterwards the arena is as it
    // was.
    Claim claim(ClassNumber number, Slot slot, EntryNumber owner);

    // Whether it is worth asking for a plan; a guess, in constant time. After a plan was refused it says no until
    // some more is free than the size has found in vain since, or very much has been freed though it was taken again.
    bool can_make_room(ClassNumber number) const noexcept;

    // Moves after which allocate() may find room; if not, ask again. None: there is no way now, evict more. The caller
    // copies each move's bytes, makes the owner's entry name `to`, and finishes it; or cancels it. Until then none of
    // the moved records may be freed. is_movable(owner) is false for records in use.
    std::optional<RoomPlan> plan_room(ClassNumber number, const std::function<bool(EntryNumber)>& is_movable);
    void finish_move(const Move& move);
    void cancel_move(const Move& move);

    std::uint64_t extent_count() const noexcept { return pool_.spans.extent_count(); }
    SlotPlace place(Slot slot) const noexcept;
    // kNoEntry if the slot is not allocated, whatever its numbers are.
    EntryNumber owner_at(Slot slot) const noexcept { return pool_.spans.owner_at(slot); }
    const SizeClass& size_class(ClassNumber number) const noexcept { return pool_.spans.size_class(number); }
    std::size_t class_count() const noexcept { return pool_.spans.class_count(); }
    ArenaStats stats() const;

    // visit(ClassNumber, Slot, EntryNumber) for every record, lowest place first.
    template <typename Visit>
    void for_each_live(Visit&& visit) const;

private:
    explicit Arena(ArenaShape shape);

    // When a plan that was refused is worth another look: as soon as one of the two is reached.
    struct Refusal {
        std::int64_t free_bytes = 0;
        std::uint64_t freed_bytes = 0;
    };

    std::int64_t retry_bytes(ClassNumber number) const noexcept;

    ArenaShape shape_;
    SlotPool pool_;
    std::unordered_map<std::uint64_t, ClassNumber> classes_;
    std::vector<std::optional<Refusal>> refusals_;  // by class
    std::int64_t free_bytes_ = 0;                   // in no slot
    std::uint64_t freed_bytes_ = 0;                 // ever
    std::uint64_t moved_records_ = 0;
    std::uint64_t moved_bytes_ = 0;
};

template <typename Visit>
void Arena::for_each_live(Visit&& visit) const {
    const ExtentNumber end = pool_.spans.extent_count();
    for (ExtentNumber first = 0; first < end; ++first) {
        if (pool_.spans.is_span(first)) {
            pool_.spans.for_each_live(first, [&](Slot slot, EntryNumber owner) {
                visit(pool_.spans.mark_of(first).number, slot, owner);
                return true;
            });
        }
    }
}

}  // namespace kvo
