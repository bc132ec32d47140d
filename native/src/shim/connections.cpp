#include "shim/connections.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <utility>

#include "shim/file_descriptor.hpp"

namespace kvo {

namespace {

constexpr int kClosedAtOnce = 256;

// Looks at the first byte that has come over a connection. Returns the number of bytes, or minus an error, and whether
// a credential came with it, for which only it makes room: a descriptor would be received by a look, too.
std::pair<int, bool> look_at(int connection, bool has_credentials) noexcept {
    std::byte data{};
    iovec vector{.iov_base = &data, .iov_len = 1};
    alignas(cmsghdr) std::byte control[CMSG_LEN(sizeof(ucred))]{};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = has_credentials ? control : nullptr;
    message.msg_controllen = has_credentials ? sizeof(control) : 0;
    const ssize_t bytes = recvmsg(connection, &message, MSG_PEEK | MSG_DONTWAIT);
    return {bytes < 0 ? -errno : static_cast<int>(bytes), message.msg_controllen > 0};
}

// A packet without bytes looks like the end, and so does an error that is told once: something may have come before it.
// If a descriptor lies in a connection, closing it may take as long as the sender likes.
bool is_closed_and_empty(int connection) noexcept {
    if (const int bytes = look_at(connection, false).first; bytes > 0 || bytes == -EAGAIN) {
        return false;
    }
    int type = 0;
    socklen_t size = sizeof(type);
    getsockopt(connection, SOL_SOCKET, SO_TYPE, &type, &size);
    if (type == SOCK_STREAM) {
        return look_at(connection, false).first <= 0;
    }
    // With this option the kernel adds a credential to each packet, and none to the end.
    const int on = 1;
    setsockopt(connection, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on));
    if (const auto [bytes, has_credential] = look_at(connection, true); bytes == 0 && !has_credential) {
        return true;
    }
    const int off = 0;
    setsockopt(connection, SOL_SOCKET, SO_PASSCRED, &off, sizeof(off));
    return false;
}

}  // namespace

int accept_open(int listener) noexcept {
    for (int closed = 0; closed < kClosedAtOnce;) {
        FileDescriptor connection(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!connection.is_open()) {
            if (errno == EINTR || errno == ECONNABORTED) {
                ++closed;
                continue;
            }
            return -errno;
        }
        if (!is_closed_and_empty(connection.number())) {
            return connection.release();
        }
        ++closed;
    }
    return -EAGAIN;
}

}  // namespace kvo
