// An I/O engine as the disk tier uses it: reads go first, transfers are whole, and a file that does not answer costs
// its deadline and nothing more.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "io/io_engine.hpp"

namespace kvo {

using Instant = std::chrono::steady_clock::time_point;

struct IoOrder {
    IoRequest request;
    Instant deadline;
};

struct IoResult {
    std::uint64_t token = 0;
    int error = 0;         // an errno; 0: every byte was moved. ETIMEDOUT: the deadline, ENODATA: the file ends before
    bool is_held = false;  // the kernel may still touch the memory, which is told later by a second, late result
    bool is_late = false;  // that one: the memory is free
};

// For one thread at a time. Orders that wait are bounded by the memory that the caller has for them.
class IoQueue {
public:
    // Writes take at most `write_depth` of the engine's places, so that reads find one.
    IoQueue(std::unique_ptr<IoEngine> engine, std::size_t write_depth);

    void submit(const IoOrder& order);

    // Begins the orders that can begin, and appends the results of those that have ended. Never waits.
    void poll(Instant now, std::vector<IoResult>& results);

    // The earliest deadline of the orders that wait or are under way, or Instant::max() if there are none.
    Instant next_deadline() const;

    std::size_t pending() const noexcept { return reads_.size() + writes_.size() + under_way_; }
    std::size_t held() const noexcept { return held_; }  // expired, with memory that is not ours yet
    int file() const noexcept { return engine_->file(); }
    const char* engine_name() const noexcept { return engine_->name(); }

    // Drops waiting orders without results, and waits for those under way. Returns false if some still are; their
    // memory must then stay for good.
    bool close(int timeout_ms);

private:
    struct Place {
        IoOrder order;
        std::uint32_t done = 0;  // bytes
        bool is_used = false;
        bool is_told = false;  // expired
    };

    void begin(std::deque<IoOrder>& orders, std::size_t limit);
    bool begin_one(const IoOrder& order);
    void issue(std::size_t place);
    void end(const IoEnd& ended, std::vector<IoResult>& results);
    void finish(std::size_t place, int error, std::vector<IoResult>& results);
    void expire(Instant now, std::vector<IoResult>& results);

    const std::unique_ptr<IoEngine> engine_;
    const std::size_t write_depth_;
    std::deque<IoOrder> reads_;
    std::deque<IoOrder> writes_;
    std::vector<Place> places_;
    std::vector<std::size_t> free_places_;
    std::vector<std::size_t> to_issue_;  // places whose rest the engine had no room for
    std::vector<IoEnd> ended_;
    std::size_t under_way_ = 0;
    std::size_t writes_under_way_ = 0;
    std::size_t held_ = 0;
};

// Waits until the file can be read, or for `timeout_ms`. False after the timeout.
bool wait_readable(int file, int timeout_ms);

}  // namespace kvo
