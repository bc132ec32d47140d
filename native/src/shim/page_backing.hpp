// Giving the pages of a shared file to its mapping ahead of use, so that no later touch can fail.
// All functions preserve what the pages hold and may block for as long as the kernel needs to find and clear the pages
// (about 0.5 s per GiB and thread). A kernel that finds no memory answers with a Status, except where a memory cgroup
// is full: there its OOM killer acts first. So callers check the headroom before (shim/memory_headroom).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.hpp"

namespace kvo {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Gives the file pages for a range within its size, without mapping them. Code::unavailable: the memory is short, and
// the pages of this call are given back.
Status allocate_file_pages(int file, std::uint64_t offset, std::uint64_t length);

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
