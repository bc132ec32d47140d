// A piece of shared memory: an unnamed file in memory (memfd) of a fixed size, and our mapping of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "shim/file_descriptor.hpp"
#include "shim/numa_policy.hpp"
#include "shim/shared_mapping.hpp"

namespace kvo {

enum class HugePages : std::uint8_t {
    none,
    transparent,  // where the kernel finds them
    hugetlb_2m,   // from the pool the machine has set aside, all or none; not for sparse segments
    hugetlb_1g,
};

struct SegmentWish {
    std::string name = "kvoffload";  // shown in /proc/<pid>/maps
    std::uint64_t size_bytes = 0;    // a multiple of the page size; address space, no memory yet
    HugePages huge_pages = HugePages::transparent;
    PlacementWish placement;
    ForkRule fork_rule = ForkRule::drop;
};

struct AdoptionTerms {
    std::uint64_t size_bytes = 0;  // the file must have exactly this size
    Access access = Access::read_write;
    HugePages huge_pages = HugePages::transparent;  // none or transparent; what the file is from hugetlb stays so
    ForkRule fork_rule = ForkRule::drop;
    bool is_own = false;  // the file must be this user's, and its descriptor need not be one for writing
};

// How commit_range makes sure of the memory before it takes it.
struct CommitTerms {
    std::uint64_t keep_free_bytes = 0;  // what must be left to others
    unsigned committers = 1;            // threads that commit ranges of about this length at the same time
    std::filesystem::path proc = "/proc";
};

// Movable; the mapping's address stays. Const functions and commit_range may be called by several threads at once.
//
// It is sealed against shrinking, growing and further sealing when it is created, so a process that holds it can touch
// committed pages without fear of SIGBUS, whatever other holders do. A process that may write can also punch holes;
// digests detect that. The kernel allocates a page that is not committed at its first touch, even a reader's, and if
// memory is short that touch kills the process. So no process may touch pages that were not committed.
class Segment {
public:
    // A new file, mapped read-write, all zeros, without pages. Blocks for the time of a few system calls.
    static Result<Segment> create(const SegmentWish& wish);

    // A file that another process sent. Refuses a file that is not a memfd, has another size or lacks the seals. Keeps
    // its contents without reading them. Takes the descriptor in any case.
    static Result<Segment> adopt(FileDescriptor file, const AdoptionTerms& terms);

    // Gives the range its pages (rounded outwards to whole ones), cleared if new, and maps them, so that touching them
    // can no longer fail. Keeps pages that are there. Blocks for about 0.5 s per GiB, so callers must not hold a lock.
    // Code::unavailable: memory is short; the message says how much was asked for and what the limit is. Part of the
    // pages may have been allocated. Needs Access::read_write.
    Status commit_range(std::uint64_t offset, std::uint64_t length, const CommitTerms& terms = {});

    // Gives all pages back to the system; the mappings stay, in every process. No process may have them pinned, or
    // touch them until they are committed again.
    Status free_pages();

    // A descriptor of the same file that cannot be mapped for writing. Guards against mistakes, and against processes
    // of other users; one of the same user could open the file again for writing. Needs /proc.
    Result<FileDescriptor> open_read_only() const;

    std::uint64_t held_bytes() const;  // memory the file has taken, by all processes
    std::uint64_t huge_bytes() const;  // of our mapping, by huge pages; slow, see huge_bytes_mapped

    std::span<const std::byte> bytes() const noexcept { return {mapping_.start(), mapping_.size()}; }
    std::span<std::byte> writable_bytes() noexcept;  // empty if read-only
    std::uint64_t size_bytes() const noexcept { return mapping_.size(); }
    std::uint64_t page_bytes() const noexcept { return page_bytes_; }
    int file() const noexcept { return file_.number(); }
    bool is_writable() const noexcept { return access_ == Access::read_write; }
    bool is_hugetlb() const noexcept { return is_hugetlb_; }
    const std::string& refused() const noexcept { return refused_; }  // wishes not granted and why; empty: none

private:
    Segment(FileDescriptor file, SharedMapping mapping, Access access) noexcept;

    void note_refusal(const std::string& reason);
    void wish_transparent(HugePages wish);

    FileDescriptor file_;
    SharedMapping mapping_;
    Access access_;
    std::uint64_t page_bytes_ = 0;
    bool is_hugetlb_ = false;
    bool wants_transparent_ = false;
    std::string refused_;
};

// Giving a segment its memory before it is used, by several threads.

struct PopulateTerms {
    unsigned threads = 1;  // fewer are used if the system has no more
    // Gives other threads priority when processors are short. It does not use SCHED_IDLE: a thread that is kept waiting
    // there would keep the process's memory map locked, and so block every thread that maps something.
    bool is_background = false;
    std::size_t slice_bytes = std::size_t{32} << 20;
    std::uint64_t keep_free_bytes = 0;  // memory that must be left to other processes
    std::filesystem::path proc = "/proc";
};

// Shared with the threads that watch or cancel; of one or several segments, one after the other.
struct PopulateProgress {
    std::atomic<std::uint64_t> done_bytes = 0;
    std::atomic<bool> is_cancelled = false;  // any thread may set it; each working thread then ends after its slice
};

struct SegmentRange {
    std::uint64_t offset = 0;
    std::uint64_t length = UINT64_MAX;  // at most; the segment's end bounds it
};

// Blocks until all pages of the range are there (about 0.5 s per GiB and thread), until it is cancelled, or until a
// fault; leaves no thread behind. Keeps the segment's contents. Fails with Code::unavailable, at once if the headroom
// is too small for the missing pages, or later if other processes took the memory meanwhile; pages given until then
// stay as long as the segment. Returns false if it was cancelled.
Result<bool> populate(Segment& segment, const PopulateTerms& terms, PopulateProgress& progress,
                      SegmentRange range = {});

// A cache's segments as another process of it sees them: mapped, and addressed as the cache counts.
//
// Immutable, so safe to call from any thread. A forked child does not have the memory.
class SegmentMap {
public:
    // Maps all of them for reading and writing. Takes the descriptors in any case. Code::invalid: one is no segment of
    // this size.
    static Result<std::unique_ptr<SegmentMap>> open(std::vector<FileDescriptor> files, std::uint64_t segment_bytes);

    std::uint64_t size_bytes() const noexcept { return segments_.size() * segment_bytes_; }

    // Where each segment begins in this process.
    std::vector<std::uint64_t> bases() const;

    // Where the slot at this address of the cache lies in this process. A record is never in two segments.
    // Code::invalid: there are no such bytes.
    Result<std::span<std::byte>> find(std::uint64_t address, std::uint64_t length) const;

private:
    SegmentMap(std::vector<Segment> segments, std::uint64_t segment_bytes);

    std::vector<Segment> segments_;
    std::vector<std::span<std::byte>> records_;  // of each segment all its bytes
    std::uint64_t segment_bytes_;
};

}  // namespace kvo
