// Codes and decodes records in a thread that has a low priority, so that the thread that waits keeps its own: whoever
// holds a lock that others need, as Python's threads do, must not be the one that waits for a processor.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <thread>

#include "codec/record_codec.hpp"

namespace kvo {

// For one thread at a time. Its thread begins with the first record. Where none can be started, the caller's does it;
// so in a forked child, which has it not.
class BackgroundCodec {
public:
    BackgroundCodec() = default;
    BackgroundCodec(const BackgroundCodec&) = delete;
    BackgroundCodec& operator=(const BackgroundCodec&) = delete;
    ~BackgroundCodec();

    // As RecordEncoder::encode; waits until it has ended.
    std::span<const std::uint8_t> encode(std::span<const std::uint8_t> record);

    // As decode_record; waits until it has ended.
    bool decode(std::span<const std::uint8_t> coded, std::span<std::uint8_t> record);

private:
    enum class State : std::uint32_t { idle, wanted, stopping };

    void run(const std::function<void()>& work);
    void serve();

    RecordEncoder encoder_;
    std::thread thread_;
    pid_t process_ = 0;  // that has it
    // No condition: a forked child cannot destroy one on which the thread waits.
    std::atomic<State> state_ = State::idle;
    // The thread's while the state is `wanted`:
    const std::function<void()>* work_ = nullptr;
    std::exception_ptr fault_;
};

}  // namespace kvo
