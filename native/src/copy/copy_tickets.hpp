// Where tickets are: submitted, with the device, ended, told.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "copy/copy_engine.hpp"
#include "copy/cuda_events.hpp"

namespace kvo {

// Safe to call from any thread. What is noexcept allocates nothing, so that every plan that was submitted also ends.
class CopyTickets {
public:
    explicit CopyTickets(std::size_t limit) : limit_(limit) {}

    // Code::unavailable: too many are submitted and not told. Throws std::bad_alloc, and opens nothing then.
    Result<CopyTicket> open();
    // Removes the ticket of a plan that could not be queued after all: no caller has seen it.
    void forget(CopyTicket ticket) noexcept;
    // All its work is with the device; `done` follows it there.
    void give_to_device(CopyTicket ticket, SharedEvent done) noexcept;
    void finish(CopyTicket ticket, Status status, std::vector<RunDigest> digests,
                std::chrono::nanoseconds copied) noexcept;

    // Nothing is with the device any more.
    void release_events() noexcept;

    // Throws std::bad_alloc, and takes nothing then.
    std::vector<FinishedCopy> take_finished();
    // Waits until all plans that are submitted now have finished.
    bool wait_until_finished(int timeout_ms);
    // Waits until the ticket is with the device or has ended. Null: it has ended, and its event was given back.
    // Code::invalid: it never was, or it has been told. Code::unavailable: still neither. Else what became of it.
    Result<SharedEvent> wait_for_event(CopyTicket ticket, int timeout_ms);

private:
    struct Entry {
        bool is_with_device = false;
        bool is_finished = false;
        SharedEvent done;
        Status status;
        std::vector<RunDigest> digests;
        std::chrono::nanoseconds copied{0};
    };

    const std::size_t limit_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<CopyTicket, Entry> entries_;  // not told
    CopyTicket last_ = 0;
    std::size_t finished_count_ = 0;
};

}  // namespace kvo
