#include "service/express_end.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "base/clock.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t kSecondNs = 1'000'000'000;

}  // namespace

bool ExpressEnd::send(std::span<const std::uint8_t> frame) {
    const bool goes_at_once = unsent_.empty() && frame.size() >= kLaterBytes && frame.size() <= kUnsentBytes;
    return goes_at_once ? send_uncopied(frame) : add(frame) && flush();
}

// Nothing is unsent. What the socket takes of a long frame is not copied before.
bool ExpressEnd::send_uncopied(std::span<const std::uint8_t> frame) {
    auto size = static_cast<std::uint32_t>(frame.size());
    std::array<iovec, 2> parts{iovec{.iov_base = &size, .iov_len = sizeof(size)},
                               iovec{.iov_base = const_cast<std::uint8_t*>(frame.data()), .iov_len = frame.size()}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t taken = sendmsg(file(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (taken < 0 && errno != EAGAIN && errno != EINTR) {
        return false;
    }
    std::size_t at = static_cast<std::size_t>(std::max<ssize_t>(taken, 0));
    for (const iovec& part : parts) {
        const std::size_t gone = std::min(at, part.iov_len);
        unsent_.append(static_cast<const char*>(part.iov_base) + gone, part.iov_len - gone);
        at -= gone;
    }
    return flush();
}

bool ExpressEnd::send_later(std::span<const std::uint8_t> frame) {
    return add(frame) && (unsent_.size() < kLaterBytes || flush());
}

bool ExpressEnd::add(std::span<const std::uint8_t> frame) {
    if (unsent_.size() - sent_ + frame.size() > kUnsentBytes) {
        return false;
    }
    const auto size = static_cast<std::uint32_t>(frame.size());
    unsent_.append(reinterpret_cast<const char*>(&size), sizeof(size));
    unsent_.append(reinterpret_cast<const char*>(frame.data()), frame.size());
    return true;
}

bool ExpressEnd::flush() {
    while (sent_ < unsent_.size()) {
        const ssize_t sent =
            ::send(file(), unsent_.data() + sent_, unsent_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) {
            continue;
        }
        if (sent < 0 && errno != EAGAIN) {
            return false;
        }
        if (sent <= 0) {
            break;
        }
        sent_ += static_cast<std::size_t>(sent);
    }
    if (sent_ == unsent_.size() || sent_ > kUnsentBytes) {
        unsent_.erase(0, std::exchange(sent_, 0));
    }
    has_unsent_.store(!unsent_.empty(), std::memory_order_relaxed);
    return true;
}

void ExpressEnd::wait(int other, std::uint64_t timeout_ns) {
    const auto events = static_cast<short>(has_unsent() ? POLLIN | POLLOUT : POLLIN);
    // A negative file is ignored.
    std::array<pollfd, 2> ready{pollfd{.fd = file(), .events = events, .revents = 0},
                                pollfd{.fd = other, .events = POLLIN, .revents = 0}};
    const auto look = [&](std::uint64_t for_ns) {
        const timespec none{};
        const std::uint64_t start_ns = now_ns();
        while (now_ns() - start_ns < for_ns) {
            if (ppoll(ready.data(), ready.size(), &none, nullptr) > 0) {
                return true;
            }
        }
        return false;
    };
    if (timeout_ns > kNoSleepNs && look_.is_worth()) {
        if (look(kLookNs)) {
            return;
        }
        look_.was_in_vain();
        timeout_ns -= kLookNs;
    } else if (timeout_ns != 0 && timeout_ns <= kNoSleepNs) {
        look(timeout_ns);
        return;
    }
    const timespec timeout{.tv_sec = static_cast<time_t>(timeout_ns / kSecondNs),
                           .tv_nsec = static_cast<long>(timeout_ns % kSecondNs)};
    // Interrupted is as good as ready: the caller looks, and waits again.
    ppoll(ready.data(), ready.size(), &timeout, nullptr);
}

void ExpressEnd::shut() { shutdown(file(), SHUT_RDWR); }

// Bytes; -1: nothing comes any more.
int ExpressEnd::receive_some(std::span<std::uint8_t> room) const {
    for (;;) {
        const ssize_t came = recv(file(), room.data(), std::min<std::size_t>(room.size(), INT_MAX), MSG_DONTWAIT);
        if (came > 0) {
            return static_cast<int>(came);
        }
        if (came == 0 || (errno != EINTR && errno != EAGAIN)) {
            return -1;
        }
        if (errno == EAGAIN) {
            return 0;
        }
    }
}

}  // namespace kvo
