// Host memory that the driver knows: registered in the background, piece by piece, each usable as soon as it is.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shim/cuda_api.hpp"

namespace kvo {

struct HostPiece {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    CudaAddress mapped = 0;  // what the device calls `begin`
};

// Sorted and disjoint; one copy never crosses two pieces, as the driver takes each for an allocation of its own.
using HostPieces = std::vector<HostPiece>;

// The longest part of [address, address + length) that begins at `address` and lies in one piece, or in none.
struct HostSpan {
    std::uint64_t length = 0;
    bool is_registered = false;
    CudaAddress mapped = 0;
};
HostSpan span_at(const HostPieces& pieces, std::uint64_t address, std::uint64_t length);

struct RegistrationProgress {
    std::uint64_t asked_bytes = 0;
    std::uint64_t registered_bytes = 0;
    bool is_done = true;      // nothing is waiting to be registered
    std::string problem;      // why a range stays unregistered in part or in whole; empty: nothing failed
    bool is_leaving = false;  // what was removed is still registered, and must stay
};

// Safe to call from any thread.
class CudaRanges {
public:
    // Code::failed: no thread can be had.
    static Result<std::unique_ptr<CudaRanges>> start(const CudaApi& api, CudaContext context,
                                                     std::uint64_t piece_bytes);
    // Leaves everything registered unless close has succeeded.
    ~CudaRanges();
    CudaRanges(const CudaRanges&) = delete;
    CudaRanges& operator=(const CudaRanges&) = delete;

    // Returns at once. Whole pages of memory are registered; what the range has of others is left as it is. The memory
    // stays until close, or until it is removed and nothing is leaving any more. Code::invalid: no bytes, or beyond all
    // addresses.
    Status add(std::uint64_t begin, std::uint64_t length);
    // Undoes an add, and returns at once: each piece is unregistered when no caller holds a list any more that it is
    // in. Code::invalid: there is no such range.
    Status remove(std::uint64_t begin, std::uint64_t length);
    // A caller that gives pieces to the device holds the list until the device is done with them.
    std::shared_ptr<const HostPieces> pieces() const;
    RegistrationProgress progress() const;
    // Waits until this many bytes are registered, or no more will be, or the time is over.
    void wait_for(std::uint64_t bytes, int timeout_ms) const;

    // Unregisters everything; no copy may be using it. False: that still goes on, and may be asked again.
    bool close(int timeout_ms);

private:
    struct Range {
        std::uint64_t begin;
        std::uint64_t end;
        bool operator==(const Range&) const = default;
    };
    // A list that was replaced; a caller may still hold it.
    struct Former {
        std::uint64_t number;
        std::weak_ptr<const HostPieces> pieces;
    };
    // A piece that is in former lists alone, up to this number.
    struct Leaving {
        std::uint64_t number;
        HostPiece piece;
    };

    using Clock = std::chrono::steady_clock;

    CudaRanges(const CudaApi& api, CudaContext context, std::uint64_t piece_bytes);
    void run();
    // Waits as long as the call before, which began then, has taken.
    void yield_driver(std::unique_lock<std::mutex>& lock, Clock::time_point begun);
    // The queue's first piece, and then what is left of its range.
    void register_next(std::unique_lock<std::mutex>& lock);
    bool register_piece(const Range& piece);
    void prepare_to_publish();
    void publish(std::shared_ptr<const HostPieces> pieces) noexcept;
    void note_problem(const char* what, std::uint64_t length, CudaStatus status) noexcept;
    // Takes removed ranges out of the list that callers get.
    void take_out();
    // Unregisters pieces of such ranges that are in no list that a caller holds.
    void unregister_unused(std::unique_lock<std::mutex>& lock);
    void unregister_all();

    const CudaApi& api_;
    const CudaContext context_;
    const std::uint64_t piece_bytes_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::vector<Range> asked_;
    std::list<Range> queue_;
    std::list<Range> removed_;                                                             // and not taken out yet
    const std::shared_ptr<const HostPieces> none_ = std::make_shared<const HostPieces>();  // after close
    std::shared_ptr<const HostPieces> pieces_ = std::make_shared<const HostPieces>();
    std::uint64_t number_ = 1;  // of that list
    std::vector<Former> former_;
    std::vector<Leaving> leaving_;
    RegistrationProgress progress_;
    bool is_stopping_ = false;
    bool unregisters_ = false;
    bool is_closed_ = false;
    std::thread thread_;
};

}  // namespace kvo
