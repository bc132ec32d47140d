// A mapping of a shared file, at an address that huge pages can be used at.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/status.hpp"

namespace kvo {

enum class Access : std::uint8_t { read_only, read_write };

// Whether a child of fork() has the mapping, too.
enum class ForkRule : std::uint8_t {
    // Nothing is mapped: touching it ends the child with SIGSEGV. For a server's structures, since two processes that
    // both believe to own them would destroy them. For an engine's segments too: the server does not know the child, so
    // it would give away slots that the child still copies from once the processes that it knows have ended.
    drop,
    // The same pages are mapped. For read-only mappings whose readers check what they read.
    keep,
};

class SharedMapping {
public:
    SharedMapping() noexcept = default;
    // Maps `size` bytes from the file's beginning, starting at a multiple of `alignment` (a power of two, at least a
    // page). Does not touch the pages; of a hugetlb file it reserves them. The file may be closed afterwards.
    static Result<SharedMapping> map(int file, std::size_t size, std::size_t alignment, Access access, ForkRule rule);

    SharedMapping(SharedMapping&& other) noexcept { swap(other); }
    SharedMapping& operator=(SharedMapping&& other) noexcept {
        SharedMapping taken(std::move(other));
        swap(taken);
        return *this;
    }
    ~SharedMapping();

    std::byte* start() const noexcept { return start_; }  // writing is the caller's promise of Access::read_write
    std::size_t size() const noexcept { return size_; }

private:
    void swap(SharedMapping& other) noexcept {
        std::swap(start_, other.start_);
        std::swap(size_, other.size_);
        std::swap(mapped_by_, other.mapped_by_);
        std::swap(rule_, other.rule_);
    }

    std::byte* start_ = nullptr;
    std::size_t size_ = 0;
    pid_t mapped_by_ = 0;
    ForkRule rule_ = ForkRule::drop;
};

// Giving the pages of a shared file to its mapping ahead of use, so that no later touch can fail.
// All functions preserve what the pages hold and may block for as long as the kernel needs to find and clear the pages
// (about 0.5 s per GiB and thread). A kernel that finds no memory answers with a Status, except where a memory cgroup
// is full: there its OOM killer acts first. So callers check the headroom before (shim/memory_headroom).

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Gives the file pages for a range within its size, without mapping them. Code::unavailable: the memory is short, and
// the pages of this call are given back.
Status allocate_file_pages(int file, std::uint64_t offset, std::uint64_t length);

// Takes the pages of a range away from the file, and from all mappings: they read zeros there afterwards, and a touch
// takes a new page. Pages that a driver has pinned stay taken, and are no longer the file's.
Status free_file_pages(int file, std::uint64_t offset, std::uint64_t length);

// Maps the pages of a range of a shared writable mapping, giving the file those it lacks. `start` is at a page's
// border. The kernel does it in a call for 2 MiB (since Linux 5.14), since each call keeps the process's memory map
// locked and with it everybody who maps something; otherwise a byte of each page is read, which is sound only after
// allocate_file_pages.
Status populate_pages(void* start, std::size_t length);

// The second way of populate_pages, which every kernel has.
void touch_pages(const void* start, std::size_t length);

// Turns those aligned 2 MiB pieces of a range into huge pages that the kernel is able to (Linux 6.1), whatever the
// machine's setting for huge pages of shared memory is, unless that is "deny". Pieces that the kernel cannot turn stay
// as they are; huge_bytes_mapped shows the result. Makes a single system call: each one first waits for all processors,
// for one caller of the machine at a time and with the process's memory map locked. On a busy machine that takes up to
// seconds.
void collapse_into_huge_pages(void* start, std::size_t length);

// Bytes of a mapping that are mapped by huge pages, hugetlb pages included. Reads /proc/self/smaps: slow with thousands
// of mappings, not for hot paths. 0 if it cannot be read.
std::uint64_t huge_bytes_mapped(const void* start, std::size_t length);

}  // namespace kvo
