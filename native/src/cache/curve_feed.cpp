#include "cache/curve_feed.hpp"

#include <pthread.h>
#include <unistd.h>

#include <new>
#include <system_error>
#include <utility>

namespace kvo {

CurveFeed::CurveFeed(MemoryCurveTerms terms) : curve_(std::move(terms)), sample_limit_(curve_.sample_limit()) {}

CurveFeed::~CurveFeed() {
    if (thread_.joinable() && getpid() != process_) {
        // A forked child does not have the thread, and the handle may name another thread here: it is left as it is.
        static_cast<void>(new std::thread(std::move(thread_)));
    } else if (thread_.joinable()) {
        is_ending_.store(true);
        woken_.fetch_add(1);
        woken_.notify_one();
        thread_.join();
    }
}

void CurveFeed::add(std::uint64_t hash_word, PoolNote note) {
    const std::uint32_t written = written_.load(std::memory_order_relaxed);
    const std::uint32_t waiting = written - read_.load(std::memory_order_acquire);
    if (waiting == kNotes) {
        // Neither asked for nor in the sample: the share of hits is that of the others.
        if (note.kind == PoolNote::Kind::use || note.kind == PoolNote::Kind::save) {
            passed_ = {};
        }
        return;
    }
    note.sample = curve_.sample_of(hash_word);
    note.passed = std::exchange(passed_, {});
    notes_[written % kNotes] = note;
    written_.store(written + 1, std::memory_order_release);
    if (!std::exchange(has_begun_, true)) {
        drain();  // by the first note the curve chooses its sample
    } else if (waiting == kNotes / 4) {
        wake();
    }
}

// If no thread can be started, the notes wait until `counts` is called, and notes that find no place are lost.
void CurveFeed::wake() {
    if (!thread_.joinable()) {
        try {
            thread_ = std::thread([this] { run(); });
            process_ = getpid();
        } catch (const std::system_error&) {
            return;
        }
    }
    woken_.fetch_add(1);
    woken_.notify_one();
}

void CurveFeed::run() {
    pthread_setname_np(pthread_self(), "kvoffload-curve");
    static_cast<void>(!nice(kNiceness));  // a thread's own, on Linux
    for (std::uint32_t seen = 0; !is_ending_.load(); seen = woken_.load()) {
        while (read_.load() != written_.load()) {
            drain();
        }
        woken_.wait(seen);
    }
}

// Notes that are added meanwhile are taken the next time.
void CurveFeed::drain() {
    const std::lock_guard lock(mutex_);
    std::uint32_t read = read_.load(std::memory_order_relaxed);
    for (const std::uint32_t end = written_.load(std::memory_order_acquire); read != end; ++read) {
        take(notes_[read % kNotes]);
        read_.store(read + 1, std::memory_order_release);
    }
    sample_limit_.store(has_failed_ ? 0 : curve_.sample_limit(), std::memory_order_relaxed);
}

// Without memory for it nothing is followed from then on: it is a statistic.
void CurveFeed::take(const PoolNote& note) {
    try {
        if (!has_failed_) {
            curve_.take(note);
        }
    } catch (const std::bad_alloc&) {
        has_failed_ = true;
    }
}

MemoryCurve::Counts CurveFeed::counts() {
    drain();
    const std::lock_guard lock(mutex_);
    return curve_.counts();
}

}  // namespace kvo
