// The memory of a cache as files: the lock that says whose it is, the index, and the segments that records lie in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arena/segment.hpp"
#include "cache/tenant_table.hpp"
#include "evict/prefix_policy.hpp"
#include "index/index_file.hpp"
#include "shim/file_lock.hpp"

namespace kvo {

// Options of a cache: how much memory it has, its owner, and the tenants that share it.

constexpr std::uint64_t kPoolLimit = 1ULL << 56;  // more than any machine has

enum class Verify : std::uint8_t {
    adopted,  // a record that a dead process left, at its first use
    always,   // every record, at every use
};

// The owner of a cache. Its successors are of the same domain.
struct CacheOwner {
    std::string domain = {};
    std::uint64_t boot_id = 0;  // number by which engines know the process that writes; 0: they know none
    std::optional<std::vector<std::uint32_t>> users = {};  // users that may map it; none: every user
};

struct CacheOptions {
    std::uint64_t pool_bytes = 0;  // rounded up to whole segments
    std::uint64_t segment_bytes = 1ULL << 30;
    std::uint64_t extent_bytes = 1ULL << 20;
    EntryNumber entry_limit = 0;
    MakePolicy policy = make_prefix_policy;
    Verify verify = Verify::adopted;
    HugePages huge_pages = HugePages::transparent;
    PlacementWish placement{.placement = Placement::interleave};  // ranks of all nodes use the pool
    PopulateTerms populate;
    std::uint64_t step_bytes = 128ULL << 20;  // the pool's first part, and how much it grows at once
    CacheOwner owner = {};
    std::uint64_t former_boot_id = 0;  // of a successor: the process whose memory it takes over; 0: any
    bool is_sparse = false;            // pages come at the first touch: for tests of pools larger than the machine
    // For a successor: the tenants that share the pool from now on. Blocks of other former tenants then belong to no
    // tenant. None: the same tenants as before.
    std::optional<std::vector<TenantTerms>> tenants = {};
};

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
