// Codes and decodes records in a thread of low priority, so that the calling thread keeps its own priority: a thread
// that holds a lock others need, as Python's threads do, must not have to wait for a processor.
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

// One thread at a time may call it. The codec starts its thread with the first record. If none can be started, and in a
// forked child, which does not have that thread, the caller's thread does the work.
class BackgroundCodec {
public:
    BackgroundCodec() = default;
    BackgroundCodec(const BackgroundCodec&) = delete;
    BackgroundCodec& operator=(const BackgroundCodec&) = delete;
    ~BackgroundCodec();

    // Runs RecordEncoder::encode and waits for its result.
    std::span<const std::uint8_t> encode(std::span<const std::uint8_t> record);

    // Runs decode_record and waits for its result.
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
