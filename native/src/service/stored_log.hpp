// Blocks that became readable, or that a process wants to be forgotten, kept for whoever tells others of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "cache/cache_core.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// Of one batch. `owner` is whatever its writer is called by whoever reads the log.
struct StoredBlocks {
    std::uint64_t owner = 0;
    std::uint32_t group = 0;
    std::vector<std::uint8_t> hashes;
    std::vector<std::uint8_t> parents;  // none, or as many
    bool is_forgotten = false;          // by a process's wish
};

// Safe to call from any thread.
class StoredLog {
public:
    // Beyond so many blocks those that were stored are only counted; beyond 16 times as many all are.
    explicit StoredLog(std::size_t limit);

    // Readable when there is something to be taken. The log's own.
    int file() const { return ready_.number(); }
    // Nobody asks any more, or watches the file.
    void close();

    // Whether anybody wants to know. Blocks that are stored before this are not told.
    void watch(bool is_wanted);
    bool is_wanted() const { return is_wanted_.load(std::memory_order_acquire); }

    void add(StoredBlocks stored);

    struct Taken {
        std::vector<StoredBlocks> stored;
        std::uint64_t lost = 0;
    };
    Taken take();

private:
    const std::size_t limit_;
    std::atomic<bool> is_wanted_ = false;
    std::mutex mutex_;  // guards what follows
    FileDescriptor ready_;
    Taken kept_;
    std::size_t blocks_ = 0;
};

}  // namespace kvo
