// A stream: a queue and the thread that carries it out, in order, at a pace of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#include "fake_cuda/access_check.hpp"
#include "fake_cuda/operation.hpp"
#include "fake_cuda/pace.hpp"

namespace kvo::fake {

// State that all streams of the driver share. The mutex guards everything here, in every stream, and in the driver.
struct StreamState {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<std::uint64_t> turns{0};
    bool is_stalled = false;
    int lost_status = 0;  // 0: the device is there
    int moving = 0;       // streams that are touching memory
};

class Stream {
public:
    Stream(StreamState& shared, AccessCheck& check, Actor actor, int priority, std::uint64_t seed, int turns);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    // Under the mutex, all of these.
    void submit(Operation operation);
    std::uint64_t submitted() const { return submitted_; }
    std::uint64_t completed() const { return completed_; }
    VectorClock& clock() { return clock_; }
    Actor actor() const { return actor_; }
    int priority() const { return priority_; }
    std::shared_ptr<Capture>& capture() { return capture_; }
    // Carries out what is queued and ends its thread; join() afterwards, without the mutex.
    void finish();

    void join() { thread_.join(); }

private:
    void run();
    bool can_begin() const;
    // Calls move(), which touches memory, without the mutex.
    template <typename Move>
    void move_unlocked(std::unique_lock<std::mutex>& lock, Move move) {
        ++shared_.moving;
        lock.unlock();
        move();
        lock.lock();
        --shared_.moving;
        shared_.changed.notify_all();
    }
    void perform(const Operation& operation, std::unique_lock<std::mutex>& lock);
    void transfer(const Operation& operation, const Transfer& work, std::unique_lock<std::mutex>& lock);
    void run_kernel(const Operation& operation, const RunKernel& work, std::unique_lock<std::mutex>& lock);
    void compute(const Operation& operation, const Compute& work, std::unique_lock<std::mutex>& lock);

    StreamState& shared_;
    AccessCheck& check_;
    const Actor actor_;
    const int priority_;
    Pace pace_;
    VectorClock clock_;                 // of the last operation submitted
    std::shared_ptr<Capture> capture_;  // null: what comes is carried out
    std::deque<Operation> queue_;
    std::uint64_t submitted_ = 0;
    std::uint64_t completed_ = 0;
    bool is_finishing_ = false;
    std::thread thread_;
};

}  // namespace kvo::fake
