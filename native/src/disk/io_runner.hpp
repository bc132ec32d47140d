// I/O whose end is a call of a function.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "io/io_queue.hpp"

namespace kvo {

// For one thread at a time, which is also the one that the functions are called on, in `poll`.
class IoRunner {
public:
    using Done = std::function<void(int error)>;
    using Freed = std::function<void()>;

    IoRunner(std::unique_ptr<IoEngine> engine, std::size_t write_depth) : queue_(std::move(engine), write_depth) {}

    // `done` is called once, `freed` behind it: when nothing can touch the request's memory any more.
    void run(IoRequest request, Instant deadline, Done done, Freed freed = {}) {
        std::size_t number = calls_.size();
        if (free_.empty()) {
            calls_.emplace_back();
        } else {
            number = free_.back();
            free_.pop_back();
        }
        calls_[number] = {std::move(done), std::move(freed)};
        request.token = number;
        queue_.submit({request, deadline});
    }

    // Calls what has ended; how many.
    std::size_t poll(Instant now) {
        results_.clear();
        queue_.poll(now, results_);
        const std::vector<IoResult> results = std::exchange(results_, {});
        for (const IoResult& result : results) {
            end(result);
        }
        return results.size();
    }

    const IoQueue& queue() const noexcept { return queue_; }
    bool close(int timeout_ms) { return queue_.close(timeout_ms); }

private:
    struct Call {
        Done done;
        Freed freed;
    };

    void end(const IoResult& result) {
        Call& call = calls_[result.token];
        Done done = result.is_late ? Done() : std::exchange(call.done, {});
        Freed freed = result.is_held ? Freed() : std::exchange(call.freed, {});
        if (!result.is_held) {
            free_.push_back(result.token);
        }
        if (done) {
            done(result.error);
        }
        if (freed) {
            freed();
        }
    }

    IoQueue queue_;
    std::vector<Call> calls_;
    std::vector<std::size_t> free_;
    std::vector<IoResult> results_;
};

}  // namespace kvo
