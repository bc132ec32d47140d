// The bytes that a plan moves, as the fewest and largest runs: decided here, copied by an engine.
//
// The records of a plan are seen as one row of bytes, one behind the other, sorted by where their blocks lie. An engine
// takes any part of the row: a thread its piece, a staging buffer what it can hold. A position in the row is also the
// position in a buffer that all records are gathered into.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "copy/copy_plan.hpp"

namespace kvo {

// Bytes that lie in one piece on both sides.
struct CopyRun {
    std::uint64_t page = 0;  // address in the engine's memory
    std::uint64_t slot = 0;  // address in host memory
    std::uint64_t length = 0;
    std::uint64_t position = 0;       // in the row
    std::uint32_t item = 0;           // of the plan; of runs merged over several items the first
    std::uint64_t record_offset = 0;  // in that item's record
    std::uint32_t allocation = 0;     // that the page is in
};

// Bytes of the row that lie in one piece in host memory.
struct SlotRun {
    std::uint64_t slot = 0;
    std::uint64_t length = 0;
    std::uint64_t position = 0;
};

// Immutable, so any number of threads may read it. Plan and pages have passed their checks and outlive it.
class RunList {
public:
    // Sorts the items; expands nothing. Throws std::bad_alloc.
    RunList(const CopyPlan& plan, const PageTable& pages);

    std::uint64_t total_bytes() const noexcept { return ends_.empty() ? 0 : ends_.back(); }

    // How many runs visit_runs would find in all of it: counted in its beginning, which says enough.
    std::uint64_t estimate_runs() const noexcept;

    // Where a part of about `size_bytes` that begins at `begin` should end: at a record's begin, or at a multiple of
    // 4096 bytes in one, where there is such a place. Beyond `begin` unless that is the row's end.
    std::uint64_t end_part(std::uint64_t begin, std::uint64_t size_bytes) const noexcept;

    // Calls visit(const CopyRun&) for the bytes [begin, end) of the row, in order. Runs that touch on both sides are
    // one, except where one allocation ends and another begins; with digests only within a record, because each record
    // has a digest of its own.
    template <typename Visit>
    void visit_runs(std::uint64_t begin, std::uint64_t end, Visit visit) const;

    // Calls visit(const SlotRun&) for the same bytes, as they lie in slots. Slots that touch are one.
    template <typename Visit>
    void visit_slots(std::uint64_t begin, std::uint64_t end, Visit visit) const;

private:
    // The place in order_ of the record that has this byte of the row.
    std::size_t find_record(std::uint64_t position) const noexcept {
        return static_cast<std::size_t>(std::ranges::upper_bound(ends_, position) - ends_.begin());
    }
    std::uint64_t begin_of(std::size_t place) const noexcept { return place == 0 ? 0 : ends_[place - 1]; }

    // Calls visit(CopyRun) for each run of the record at `place` that has bytes in [begin, end), cut to them.
    template <typename Visit>
    void visit_record(std::size_t place, std::uint64_t begin, std::uint64_t end, Visit visit) const;

    const CopyPlan* plan_;
    const PageTable* pages_;
    std::vector<std::uint32_t> order_;  // items by address
    std::vector<std::uint64_t> ends_;   // of the records in that order, in the row
};

template <typename Visit>
void RunList::visit_record(std::size_t place, std::uint64_t begin, std::uint64_t end, Visit visit) const {
    const std::uint32_t number = order_[place];
    const CopyItem& item = plan_->items[number];
    const std::vector<PageRun>& runs = pages_->groups[item.group].runs;
    const std::uint64_t record_at = begin_of(place);
    std::uint64_t offset = std::max(begin, record_at) - record_at;
    const std::uint64_t last = std::min(end, ends_[place]) - record_at;
    if (offset >= last) {
        return;
    }
    // The run that has the byte at `offset`: the last one that does not begin behind it.
    auto run = std::ranges::upper_bound(runs, offset, {}, &PageRun::record_offset) - 1;
    for (; offset < last; ++run) {
        const std::uint64_t skipped = offset - run->record_offset;
        const std::uint64_t length = std::min(run->length - skipped, last - offset);
        visit(CopyRun{.page = run->base + item.block * run->stride + skipped,
                      .slot = item.slot + offset,
                      .length = length,
                      .position = record_at + offset,
                      .item = number,
                      .record_offset = offset,
                      .allocation = run->allocation});
        offset += length;
    }
}

template <typename Visit>
void RunList::visit_runs(std::uint64_t begin, std::uint64_t end, Visit visit) const {
    CopyRun open;  // what the next run may still touch
    const bool merges_items = !plan_->has_digests;
    const auto take = [&](const CopyRun& run) {
        const bool touches = run.page == open.page + open.length && run.slot == open.slot + open.length &&
                             run.allocation == open.allocation;
        if (open.length > 0 && touches && (merges_items || run.item == open.item)) {
            open.length += run.length;
            return;
        }
        if (open.length > 0) {
            visit(static_cast<const CopyRun&>(open));
        }
        open = run;
    };
    end = std::min(end, total_bytes());
    for (std::size_t place = find_record(begin); begin < end; ++place) {
        visit_record(place, begin, end, take);
        begin = std::max(begin, ends_[place]);
    }
    if (open.length > 0) {
        visit(static_cast<const CopyRun&>(open));
    }
}

template <typename Visit>
void RunList::visit_slots(std::uint64_t begin, std::uint64_t end, Visit visit) const {
    SlotRun open;
    end = std::min(end, total_bytes());
    for (std::size_t place = find_record(begin); begin < end; ++place) {
        const std::uint64_t length = std::min(end, ends_[place]) - begin;
        const std::uint64_t slot = plan_->items[order_[place]].slot + (begin - begin_of(place));
        if (open.length > 0 && slot == open.slot + open.length) {
            open.length += length;
        } else if (length > 0) {
            if (open.length > 0) {
                visit(static_cast<const SlotRun&>(open));
            }
            open = {slot, length, begin};
        }
        begin += length;
    }
    if (open.length > 0) {
        visit(static_cast<const SlotRun&>(open));
    }
}

}  // namespace kvo
