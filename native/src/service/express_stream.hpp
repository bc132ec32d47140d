// Frames out of a stream: each lies behind its length in 4 bytes, little-endian.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "service/express_messages.hpp"

namespace kvo {

using express::kLengthBytes;

// Bytes that have come, cut into frames. Belongs to one thread at a time.
class ExpressStream {
public:
    explicit ExpressStream(std::size_t frame_bytes) : frame_bytes_(frame_bytes), buffer_(kFirstBytes) {}

    // Number of bytes of memory that it will have at the next `room`, beyond what every stream begins with.
    std::size_t extra_bytes() const noexcept { return next_size() - kFirstBytes; }

    // Where to put what comes next. There is always room for a byte.
    std::span<std::uint8_t> room() {
        if (end_ == buffer_.size()) {
            buffer_.resize(next_size());
        }
        return std::span(buffer_).subspan(end_);
    }
    void add(std::size_t bytes) { end_ += bytes; }

    // Calls `act(frame)` for each whole frame, until that says false. False: it did, or a frame is too large.
    template <typename Act>
    bool take_frames(Act act) {
        std::size_t at = 0;
        while (end_ - at >= kLengthBytes) {
            std::uint32_t size = 0;
            std::memcpy(&size, buffer_.data() + at, sizeof(size));
            if (size > frame_bytes_) {
                return false;
            }
            if (end_ - at - kLengthBytes < size) {
                break;
            }
            if (!act(std::span<const std::uint8_t>(buffer_).subspan(at + kLengthBytes, size))) {
                return false;
            }
            at += kLengthBytes + size;
        }
        end_ -= at;
        if (at != 0) {
            std::memmove(buffer_.data(), buffer_.data() + at, end_);
        }
        if (end_ == 0 && buffer_.size() > kKeptBytes) {
            // One large frame is no reason to keep room for the next.
            buffer_ = std::vector<std::uint8_t>(kFirstBytes);
        }
        return true;
    }

private:
    static constexpr std::size_t kFirstBytes = 64UL << 10;
    static constexpr std::size_t kKeptBytes = 2UL << 20;

    // Twice the room, as far as the longest frame needs that.
    std::size_t next_size() const noexcept {
        const std::size_t size = buffer_.size();
        return end_ < size ? size : std::min(2 * size, std::max(frame_bytes_ + kLengthBytes, size + kFirstBytes));
    }

    const std::size_t frame_bytes_;
    std::vector<std::uint8_t> buffer_;
    std::size_t end_ = 0;
};

}  // namespace kvo
