// Digests of whole records in host memory, by threads of their own: one thread reads memory at half of a link's speed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.hpp"
#include "copy/copy_plan.hpp"
#include "digest/digest.hpp"

namespace kvo {

// A hook for tests: called before the host touches memory, which a driver cannot see.
using HostAccess = std::function<void(const void* address, std::uint64_t length, bool is_written)>;

// The records of one plan. Its slots must stay, and stay as they are, until `is_done`.
class DigestWork {
public:
    DigestWork(std::shared_ptr<const CopyPlan> plan, const PageTable& pages)
        : plan_(std::move(plan)), pages_(pages), digests_(plan_->items.size()), left_(plan_->items.size()) {}

    bool is_done() const noexcept { return left_.load(std::memory_order_acquire) == 0; }
    // Lets the threads finish the records that they are reading, and read no others. `is_done` comes soon.
    void cancel() noexcept { is_cancelled_.store(true, std::memory_order_relaxed); }
    // Returns the digests by item, once `is_done`.
    std::vector<RunDigest> take() noexcept { return std::move(digests_); }

private:
    friend class RecordDigests;

    const std::shared_ptr<const CopyPlan> plan_;
    const PageTable& pages_;
    std::vector<RunDigest> digests_;
    std::size_t next_ = 0;  // item that no thread has; the threads' lock is held
    std::atomic<std::size_t> left_;
    std::atomic<bool> is_cancelled_{false};
};

// Safe to call from any thread.
class RecordDigests {
public:
    // Code::failed: not one thread can be had; fewer than asked for are taken as they are.
    static Result<std::unique_ptr<RecordDigests>> start(unsigned thread_count, HostAccess on_access);
    // Ends when no work is left.
    ~RecordDigests();
    RecordDigests(const RecordDigests&) = delete;
    RecordDigests& operator=(const RecordDigests&) = delete;

    // Throws std::bad_alloc, and takes nothing then.
    void submit(std::shared_ptr<DigestWork> work);

private:
    explicit RecordDigests(HostAccess on_access) : on_access_(std::move(on_access)) {}
    void run();
    // Items [begin, end) of one piece of work.
    void digest(DigestWork& work, std::size_t begin, std::size_t end);

    const HostAccess on_access_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::list<std::shared_ptr<DigestWork>> queue_;  // work with items that no thread has taken
    bool is_stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace kvo
