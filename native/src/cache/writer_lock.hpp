// The lock for adding and removing entries, and the calls that threads leave at it which must not wait for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

namespace kvo {

// A thread that serves all domains leaves its calls here. They are made in their order, each under the lock: at once if
// the lock is free, else by the thread that holds it, before or after others get it. Each hold makes one call, or more
// if over kFew would be left waiting: at most kFew wait, and those that are left during one hold.
class WriterLock {
public:
    using Call = std::function<void()>;
    static constexpr std::size_t kFew = 64;

    WriterLock() = default;
    WriterLock(const WriterLock&) = delete;
    WriterLock& operator=(const WriterLock&) = delete;
    ~WriterLock();

    void lock() { mutex_.lock(); }
    bool try_lock() { return mutex_.try_lock(); }
    void unlock() {
        while (!release()) {
        }
    }

    // Never waits. A thread that holds the lock must not call it.
    void leave(Call call);
    // Leaves the next part of a call that is being made, behind all calls that were left before.
    void leave_rest(Call call) { push(std::move(call)); }

private:
    struct Left {
        Call call;
        Left* next = nullptr;
    };

    void push(Call call);
    void take_left();
    void make_calls();
    bool has_calls() const noexcept {
        return left_.load(std::memory_order_seq_cst) != nullptr || taken_count_.load(std::memory_order_relaxed) != 0;
    }
    // False: it has been taken again, for calls that wait.
    bool release() {
        if (has_calls()) {
            make_calls();
        }
        mutex_.unlock();
        return !has_calls() || !mutex_.try_lock();
    }

    std::mutex mutex_;
    std::atomic<Left*> left_ = nullptr;  // the latest first
    std::deque<Call> taken_;             // under the lock; the oldest first
    std::atomic<std::size_t> taken_count_ = 0;
};

}  // namespace kvo
