#include "cache/pool_growth.hpp"

#include <algorithm>
#include <utility>

#include "shim/memory_headroom.hpp"

namespace kvo {
namespace {

// A pool that grows leaves one part in this many of the machine's or the cgroup's memory to others.
constexpr std::uint64_t kReserveShare = 32;
constexpr std::uint32_t kRoomWaitS = 2;

}  // namespace

PoolGrowth::PoolGrowth(CacheMemory& memory, WriterLock& writer, EntryStore& store, const CacheOptions& options)
    : memory_(memory), writer_(writer), store_(store), populate_(options.populate), step_bytes_(options.step_bytes) {}

Status PoolGrowth::take_first(PopulateProgress& progress) {
    const auto first = add_step(populate_, progress);
    return first.ok() ? Status() : first.fault();
}

Result<bool> PoolGrowth::grow(PopulateProgress& progress) {
    const std::lock_guard one_at_a_time(growing_);
    if (memory_.ready_bytes() == memory_.capacity_bytes()) {
        return false;
    }
    PopulateTerms terms = populate_;
    terms.is_background = true;
    terms.slice_bytes = step_bytes_ / std::max(terms.threads, 1U);
    const std::uint64_t total = read_memory_headroom(terms.proc).total_bytes;
    terms.keep_free_bytes = std::max(terms.keep_free_bytes, total == UINT64_MAX ? 0 : total / kReserveShare);
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
