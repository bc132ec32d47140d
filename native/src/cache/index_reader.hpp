// Looking up in the index of another process, without a message to it.
#pragma once

#include <memory>
#include <mutex>
#include <span>

#include "arena/segment.hpp"
#include "cache/namespace_table.hpp"
#include "index/boundary.hpp"
#include "index/index_file.hpp"

namespace kvo {

// Safe to call from any thread. What it says may be over in the next moment: only an acquire holds anything. When the
// writer has died, answers are as of its death; while a successor takes over, anything may be missing.
class IndexReader {
public:
    // Maps the file read-only. Takes the descriptor.
    static Result<std::unique_ptr<IndexReader>> open(FileDescriptor file);

    // Whether each block is readable; `found` as long as there are hashes.
    Status lookup(Space space, std::span<const std::uint8_t> hashes, std::span<std::uint8_t> found) const;

    // The longest boundary that an acquire would find now; `query.local` if none.
    Result<std::uint64_t> find_boundary(const BoundaryQuery& query);

    // Grows whenever an answer may have changed.
    std::uint64_t version() const noexcept { return view_.header->version_counter.load(std::memory_order_acquire); }
    // Bytes of the pool in slots that are given away; rounding and holes between them come on top.
    std::uint64_t used_bytes() const noexcept { return view_.header->used_bytes.load(std::memory_order_relaxed); }
    // Bytes of the segments, from the first one on, that have their memory. Only these may be touched, and
    // not those behind them, which may have been given back. A lease or a reservation keeps the memory of its slots.
    std::uint64_t ready_bytes() const noexcept { return view_.header->ready_bytes.load(std::memory_order_acquire); }
    // The memory from this byte on is about to be given back; 0: none is.
    std::uint64_t leaving_from() const noexcept { return view_.header->leaving_from.load(std::memory_order_acquire); }
    // See kvo::mark_pinned.
    Status mark_pinned(std::uint32_t segment, bool is_pinned) const {
        return kvo::mark_pinned(segment_.file(), segment, is_pinned);
    }
    // The number of the process that writes: another process has another number.
    std::uint64_t boot_id() const noexcept { return view_.header->boot_id.load(std::memory_order_acquire); }

private:
    IndexReader(Segment segment, const IndexView& view);

    Segment segment_;
    IndexView view_;
    NamespaceTable namespaces_;
};

// Whether each of the hashes has a readable entry.
Status find_readable(const IndexView& view, Space space, std::span<const std::uint8_t> hashes,
                     std::span<std::uint8_t> found);

}  // namespace kvo
