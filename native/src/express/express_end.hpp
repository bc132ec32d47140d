// A process's end of its express channel. Nothing waits but `wait`.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "express/express_stream.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// Belongs to whoever holds the client's lock, but for `wait` and `shut`, which any thread may call.
class ExpressEnd {
public:
    ExpressEnd(FileDescriptor end, std::size_t frame_bytes) : end_(std::move(end)), stream_(frame_bytes) {}

    int file() const { return end_.number(); }

    // False: it has ended, or more than `kUnsentBytes` were not taken. What was taken goes out as the server reads.
    bool send(std::span<const std::uint8_t> frame);
    // Likewise, but it may go out with what is sent next: the server need not wake up for it alone.
    bool send_later(std::span<const std::uint8_t> frame);
    bool flush();
    // Of what was to go out at once.
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

    // Until something has come, or it has ended, or something unsent can go out, or another file is readable (-1:
    // none).
    void wait(int other, std::uint64_t timeout_ns) const;

    // Both ends see that it is over. The descriptor lives as long as this.
    void shut();

private:
    static constexpr std::size_t kUnsentBytes = 32UL << 20;
    static constexpr std::size_t kLaterBytes = 4UL << 10;

    bool add(std::span<const std::uint8_t> frame);

    int receive_some(std::span<std::uint8_t> room) const;

    const FileDescriptor end_;
    ExpressStream stream_;
    std::string unsent_;
    std::size_t sent_ = 0;  // of it
    std::atomic<bool> has_unsent_ = false;
};

}  // namespace kvo
