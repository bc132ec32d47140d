// Codes records in a thread that has a low priority, so that the thread that waits keeps its own: whoever holds a lock
// that others need, as Python's threads do, must not be the one that waits for a processor.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <thread>

#include "codec/record_codec.hpp"

namespace kvo {

// For one thread at a time. Its thread begins with the first record.
class BackgroundEncoder {
public:
    BackgroundEncoder() = default;
    BackgroundEncoder(const BackgroundEncoder&) = delete;
    BackgroundEncoder& operator=(const BackgroundEncoder&) = delete;
    ~BackgroundEncoder();

    // As RecordEncoder::encode; waits until it has ended. Where no thread can be started, the caller's codes.
    std::span<const std::uint8_t> encode(std::span<const std::uint8_t> record);

private:
    enum class State : std::uint8_t { idle, wanted, done, stopping };

    void run();

    RecordEncoder encoder_;
    std::thread thread_;
    std::mutex lock_;
    std::condition_variable changed_;
    // With the lock:
    State state_ = State::idle;
    std::span<const std::uint8_t> record_, coded_;
    std::exception_ptr fault_;
};

}  // namespace kvo
