// A process's end of its express channel. Nothing waits but `wait`.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "service/express_stream.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// Whether to look for an answer for a while before one sleeps. A wake-up costs more than most answers take; but where
// looking was in vain (the server is late, processes wait for processors) the next waits sleep at once. Of several
// threads one may be counted for another.
class LookBeforeSleep {
public:
    static constexpr unsigned kPause = 16;  // waits

    bool is_worth() {
        const unsigned left = pause_.load(std::memory_order_relaxed);
        pause_.store(left == 0 ? 0 : left - 1, std::memory_order_relaxed);
        return left == 0;
    }
    void was_in_vain() { pause_.store(kPause, std::memory_order_relaxed); }

private:
    std::atomic<unsigned> pause_ = 0;
};

// The caller holds the client's lock, except for `wait` and `shut`, which any thread may call.
class ExpressEnd {
public:
    ExpressEnd(FileDescriptor end, std::size_t frame_bytes) : end_(std::move(end)), stream_(frame_bytes) {}

    int file() const { return end_.number(); }

    // False: it has ended, or more than `kUnsentBytes` were not taken. What was taken goes out as the server reads.
    bool send(std::span<const std::uint8_t> frame);
    // Sends like `send`, but the frame may wait for the next one: the server need not wake up for it alone.
    bool send_later(std::span<const std::uint8_t> frame);
    bool flush();
    // Whether frames that should have gone out at once are still unsent.
    bool has_unsent() const { return has_unsent_.load(std::memory_order_relaxed); }

    // Calls `act(frame)`, which says whether to go on, for whole frames that have come. False: nothing comes any more.
    template <typename Act>
    bool receive(Act act) {
        // Where nothing goes out any more, what came before that is still of use.
        const bool can_send = !has_unsent() || flush();
        for (;;) {
            const std::span<std::uint8_t> room = stream_.room();
            const int came = receive_some(room);
            if (came < 0) {
                return false;
            }
            stream_.add(static_cast<std::size_t>(came));
            if (came > 0 && !stream_.take_frames(act)) {
                return false;
            }
            if (static_cast<std::size_t>(came) < room.size()) {
                return can_send;
            }
        }
    }

    // Waits until something has come, or it has ended, or something unsent can go out, or `other` is readable (-1: no
    // such file). A wait of at most 0.2 ms does not sleep, as the end of a sleep may come later than that.
    void wait(int other, std::uint64_t timeout_ns);

    // Both ends see that it is over. The descriptor lives as long as this.
    void shut();

private:
    static constexpr std::size_t kUnsentBytes = 32UL << 20;
    static constexpr std::size_t kLaterBytes = 4UL << 10;
    static constexpr std::uint64_t kLookNs = 100'000;
    static constexpr std::uint64_t kNoSleepNs = 200'000;

    bool add(std::span<const std::uint8_t> frame);
    bool send_uncopied(std::span<const std::uint8_t> frame);

    int receive_some(std::span<std::uint8_t> room) const;

    const FileDescriptor end_;
    ExpressStream stream_;
    std::string unsent_;
    std::size_t sent_ = 0;  // of it
    std::atomic<bool> has_unsent_ = false;
    LookBeforeSleep look_;
};

}  // namespace kvo
