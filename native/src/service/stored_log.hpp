// Blocks that became readable, or that a process wants forgotten, kept until they are taken to be reported to others.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "cache/cache_core.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// Blocks of one batch. `owner` is the number by which the reader of the log knows their writer.
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
    // Beyond `limit` blocks, blocks that were stored are only counted; beyond 16 times as many, forgotten ones are,
    // too.
    explicit StoredLog(std::size_t limit);

    // Readable when there is something to be taken. The log's own.
    int file() const { return ready_.number(); }
    // Called when the log is not read any more and its file is not watched.
    void close();

    // Sets whether blocks are wanted. Blocks that are stored before that are not told.
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
