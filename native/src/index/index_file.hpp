// The file an index lies in: sparse, of its full size from the start, given its pages shortly before they are used.
#pragma once

#include <array>
#include <atomic>
#include <span>

#include "arena/segment.hpp"
#include "base/status.hpp"
#include "index/index_view.hpp"

namespace kvo {

// `ensure` may be called by several threads for different regions, by one at a time for the same.
class IndexFile {
public:
    static Result<IndexFile> create(const IndexBounds& bounds, std::uint64_t seed);

    // The index of a process of this user that has ended; the caller holds the lock that says so. Takes the descriptor,
    // which need not be one for writing.
    static Result<IndexFile> adopt(FileDescriptor file);

    IndexFile(IndexFile&& other) noexcept;

    // Memory for the first `item_count` items of a region of `view().regions`, and some ahead. Blocks for the kernel's
    // work of clearing at most 4 MiB. Code::unavailable: memory is short.
    Status ensure(const Region& region, std::uint64_t item_count);

    const IndexView& view() const noexcept { return view_; }
    const Segment& segment() const noexcept { return segment_; }

    // A descriptor that cannot be mapped for writing, for other processes.
    int read_only_file() const noexcept { return read_only_.number(); }

    // The same, for one process, and a sign that it has the index for the session at this place: for as long as the
    // file is open or mapped there, by the kernel's word, in whatever PID namespace. It is a lock on a byte of the
    // file that is the descriptor's own, so it must not be given to two processes, and goes when the last copy does.
    Result<FileDescriptor> open_signed(std::uint32_t place) const;
    // Whether any process has such a sign. When in doubt there is one.
    bool has_sign(std::uint32_t place) const noexcept;

    // Whether a process has marked this segment as pinned, see mark_pinned. When in doubt one has.
    bool is_pinned(std::uint32_t segment) const noexcept;

private:
    struct Mark {
        std::uint64_t offset = 0;
        std::atomic<std::uint64_t> committed_bytes = 0;
    };

    static Result<IndexFile> open(Segment segment);
    IndexFile(Segment segment, FileDescriptor read_only, const IndexView& view);
    Status ensure_used();

    Segment segment_;
    FileDescriptor read_only_;
    IndexView view_;
    std::array<Mark, 8> marks_;
};

// Marks a segment as pinned by this process, for a driver, or takes the mark away; it goes with the last copy of this
// descriptor of the index, too. The segment's memory is not given back meanwhile. A process marks a segment, and pins
// it only if it is ready after that.
Status mark_pinned(int index_file, std::uint32_t segment, bool is_pinned);

}  // namespace kvo
