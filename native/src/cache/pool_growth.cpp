#include "cache/pool_growth.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "shim/memory_headroom.hpp"

namespace kvo {
namespace {

// A pool that grows leaves one part in this many of the machine's or the cgroup's memory to others.
constexpr std::uint64_t kReserveShare = 32;
constexpr std::uint32_t kRoomWaitS = 2;
// Bytes that one call moves out of segments that are given back, at most.
constexpr std::uint64_t kMoveLimit = std::uint64_t{1} << 30;

}  // namespace

PoolGrowth::PoolGrowth(CacheMemory& memory, WriterLock& writer, EntryStore& store, const SessionTable& sessions,
                       const CacheOptions& options)
    : memory_(memory),
      writer_(writer),
      store_(store),
      sessions_(sessions),
      populate_(options.populate),
      step_bytes_(options.step_bytes) {}

Status PoolGrowth::take_first(PopulateProgress& progress) {
    const auto first = add_step(populate_, progress);
    return first.ok() ? Status() : first.fault();
}

Result<bool> PoolGrowth::grow(PopulateProgress& progress, std::uint64_t keep_free_bytes) {
    const std::lock_guard one_at_a_time(growing_);
    use_withdrawn();
    if (memory_.ready_bytes() == memory_.capacity_bytes()) {
        return false;
    }
    PopulateTerms terms = populate_;
    terms.is_background = true;
    terms.slice_bytes = step_bytes_ / std::max(terms.threads, 1U);
    const std::uint64_t total = read_memory_headroom(terms.proc).total_bytes;
    terms.keep_free_bytes =
        std::max({terms.keep_free_bytes, keep_free_bytes, total == UINT64_MAX ? 0 : total / kReserveShare});
    expect_room(kRoomWaitS);
    const auto grown = add_step(terms, progress);
    if (!grown.ok() || !grown.value()) {
        expect_room(0);
    }
    return grown;
}

Status PoolGrowth::grow_fully(PopulateProgress& progress) {
    for (;;) {
        const auto grown = grow(progress);
        if (!grown.ok() || !grown.value()) {
            return grown.ok() ? Status() : grown.fault();
        }
    }
}

Result<Shrunk> PoolGrowth::shrink(std::uint64_t target_bytes) {
    const std::lock_guard one_at_a_time(growing_);
    const std::uint64_t segment_bytes = memory_.index().view().header->segment_bytes;
    if (memory_.segments().front().is_hugetlb()) {
        return Status(Code::invalid, "the pool has hugetlb pages, which are of use to no other process");
    }
    if (!sessions_.all_heed()) {
        return Status(Code::unavailable, "an engine of an older version, which keeps all memory, has the pool mapped");
    }
    // The first segment stays.
    const std::uint64_t kept = std::max<std::uint64_t>((target_bytes + segment_bytes - 1) / segment_bytes, 1);
    if (kept * segment_bytes < memory_.ready_bytes()) {
        vacate(static_cast<std::uint32_t>(kept));
    } else {
        use_withdrawn();
    }
    Shrunk shrunk = free_unused();
    shrunk.is_done = memory_.ready_bytes() <= kept * segment_bytes && shrunk.pinned_bytes == 0;
    return shrunk;
}

void PoolGrowth::vacate(std::uint32_t segment) {
    IndexHeader& header = *memory_.index().view().header;
    const std::uint64_t kept_bytes = segment * header.segment_bytes;
    Vacating vacating{.kept_bytes = kept_bytes, .move_bytes = kMoveLimit};
    if (header.leaving_from.load() != kept_bytes) {
        const std::lock_guard lock(writer_);
        store_.restore_withdrawn();
        store_.expect_room(0);
        store_.withdraw(segment);
        header.leaving_from.store(kept_bytes);
    }
    for (bool is_over = false; !is_over;) {
        const std::lock_guard lock(writer_);
        is_over = !store_.vacate(vacating);
    }
    const std::lock_guard lock(writer_);
    store_.cut_withdrawn();
    if (memory_.ready_bytes() <= kept_bytes) {
        header.leaving_from.store(0);
    }
}

void PoolGrowth::use_withdrawn() {
    IndexHeader& header = *memory_.index().view().header;
    if (header.leaving_from.load() != 0) {
        const std::lock_guard lock(writer_);
        store_.restore_withdrawn();
        header.leaving_from.store(0);
    }
}

// Frees the pages of the segments that are not ready any more. A process that pins one has marked it before it looked
// whether it is ready, so one without a mark is pinned by none.
Shrunk PoolGrowth::free_unused() {
    const std::uint64_t segment_bytes = memory_.index().view().header->segment_bytes;
    std::vector<Segment>& segments = memory_.segments();
    Shrunk shrunk;
    for (std::uint64_t i = (memory_.ready_bytes() + segment_bytes - 1) / segment_bytes; i < segments.size(); ++i) {
        const std::uint64_t held_bytes = segments[i].held_bytes();
        if (held_bytes == 0) {
            continue;
        }
        const bool is_pinned = memory_.index().is_pinned(static_cast<std::uint32_t>(i)) || !sessions_.all_heed();
        if (is_pinned || !segments[i].free_pages().ok()) {
            shrunk.pinned_bytes += held_bytes;
        } else {
            shrunk.freed_bytes += held_bytes;
        }
    }
    return shrunk;
}

void PoolGrowth::expect_room(std::uint32_t seconds) {
    const std::lock_guard lock(writer_);
    store_.expect_room(seconds);
}

// If the process dies after the memory was counted and before it was used, everything that the files say is still true.
Result<bool> PoolGrowth::add_step(PopulateTerms terms, PopulateProgress& progress) {
    const std::uint64_t before = memory_.ready_bytes();
    const auto end = take_step(std::move(terms), progress);
    if (!end.ok()) {
        return end.fault();
    }
    const std::lock_guard lock(writer_);
    memory_.index().view().header->ready_bytes.store(end.value(), std::memory_order_release);
    if (Status status = store_.add_extents((end.value() - before) / memory_.index().view().header->extent_bytes);
        !status.ok()) {
        return status;
    }
    return end.value() < memory_.capacity_bytes();
}

// Where the ready memory ends then.
Result<std::uint64_t> PoolGrowth::take_step(PopulateTerms terms, PopulateProgress& progress) {
    const IndexHeader& header = *memory_.index().view().header;
    // Up to all there is.
    terms.keep_free_bytes = std::min(terms.keep_free_bytes, kPoolLimit);
    std::uint64_t at = memory_.ready_bytes();
    const std::uint64_t extents = std::max<std::uint64_t>(step_bytes_ / header.extent_bytes, 1);
    const std::uint64_t end = std::min(at + extents * header.extent_bytes, memory_.capacity_bytes());
    while (at < end) {
        Segment& segment = memory_.segments()[at / header.segment_bytes];
        const std::uint64_t offset = at % header.segment_bytes;
        const std::uint64_t length = std::min(end - at, header.segment_bytes - offset);
        const auto populated = populate(segment, terms, progress, {.offset = offset, .length = length});
        if (!populated.ok()) {
            return populated.fault();
        }
        if (!populated.value()) {
            return Status(Code::failed, "taking the memory was cancelled");
        }
        at += length;
    }
    return end;
}

}  // namespace kvo
