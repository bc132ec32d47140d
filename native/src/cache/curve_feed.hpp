// Events of a pool on their way to the curve that follows it: the holder of the writer's lock only leaves a note.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "evict/memory_curve.hpp"

namespace kvo {

class CurveFeed {
public:
    explicit CurveFeed(MemoryCurveTerms terms);
    CurveFeed(const CurveFeed&) = delete;
    CurveFeed& operator=(const CurveFeed&) = delete;
    ~CurveFeed();

    // Whether notes of this block are wanted; from any thread.
    bool follows(std::uint64_t hash_word) const noexcept {
        return curve_.sample_of(hash_word) <= sample_limit_.load(std::memory_order_relaxed);
    }

    // The caller of the next two holds the writer's lock. Neither waits.
    // Counts a block that was used or saved, whether it is followed or not.
    void pass(const PoolShare& share) noexcept { passed_.add(share); }
    // Adds a note about a block that is followed. If kNotes are waiting, the note is lost and the curve is less exact.
    void add(std::uint64_t hash_word, PoolNote note);

    // Safe to call from any thread; the counts include everything that was noted before the call.
    MemoryCurve::Counts counts();

private:
    static constexpr std::uint32_t kNotes = 4096;  // a power of two
    static constexpr int kNiceness = 5;            // as of other threads that no call waits for

    void wake();
    void run();
    void drain();
    void take(const PoolNote& note);

    std::vector<PoolNote> notes_{kNotes};  // a ring: one writes, by the writer's lock, and one reads, by `mutex_`
    std::atomic<std::uint32_t> written_ = 0;
    std::atomic<std::uint32_t> read_ = 0;
    PoolShare passed_;        // since the last note that was written
    bool has_begun_ = false;  // the first note was written; under the writer's lock

    std::mutex mutex_;
    MemoryCurve curve_;        // under it; what decides about samples never changes
    bool has_failed_ = false;  // under it
    std::atomic<std::uint64_t> sample_limit_;

    std::thread thread_;  // begins when many notes wait
    pid_t process_ = 0;   // that has it
    std::atomic<std::uint32_t> woken_ = 0;
    std::atomic<bool> is_ending_ = false;
};

}  // namespace kvo
