// The memory of a cache as files: the lock that says whose it is, the index, and the segments that records lie in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "arena/segment.hpp"
#include "cache/cache_options.hpp"
#include "index/index_file.hpp"
#include "shim/file_lock.hpp"

namespace kvo {

// A cache's files. A process that holds them keeps the memory alive, and may hand it to a successor of the process that
// writes.
struct CacheFiles {
    FileDescriptor lock;
    FileDescriptor index;
    std::vector<FileDescriptor> segments;
};

// Numbers of descriptors that the cache owns: they may be sent or duplicated, but not closed. The lock's descriptor
// cannot be used to lock.
struct FileNumbers {
    int lock = -1;
    int index = -1;
    std::vector<int> segments;
};

// Safe to call from any thread. Addresses count over all segments as if they lay one behind the other.
class CacheMemory {
public:
    // Makes all files; the segments have no pages yet. Code::unavailable: the machine has less memory than that.
    static Result<std::unique_ptr<CacheMemory>> create(const CacheOptions& options);

    // Takes over the files of a process that has ended. Code::unavailable: it has not ended, or another was faster.
    // Code::invalid: they do not belong together, or are another owner's. Takes the descriptors in any case.
    static Result<std::unique_ptr<CacheMemory>> adopt(CacheFiles files, const CacheOptions& options);

    // The index's cannot be mapped for writing.
    FileNumbers files() const;
    // Notes that the memory is this process's from here on. `boot_id` 0: no engine knows the process, and a number is
    // drawn.
    Status note_boot(std::uint64_t boot_id);
    // Before a process of this user is handed them. Successors that do not admit him do not adopt them.
    void note_user(std::uint32_t uid);

    IndexFile& index() noexcept { return index_; }
    const IndexFile& index() const noexcept { return index_; }
    std::vector<Segment>& segments() noexcept { return segments_; }
    std::span<const Segment> segments() const noexcept { return segments_; }
    std::span<std::byte> bytes_at(std::uint64_t address, std::uint64_t size);
    std::uint64_t capacity_bytes() const noexcept { return segments_.size() * header().segment_bytes; }
    // Bytes of the capacity, from address 0 on, that have their memory.
    std::uint64_t ready_bytes() const noexcept { return header().ready_bytes.load(std::memory_order_acquire); }

private:
    CacheMemory(FileLock lock, IndexFile index, std::vector<Segment> segments);
    const IndexHeader& header() const noexcept { return *index_.view().header; }

    FileLock lock_;
    IndexFile index_;
    std::vector<Segment> segments_;
    std::mutex noting_;  // of users
};

}  // namespace kvo
