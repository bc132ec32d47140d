// The other end of an express channel, which waits for whatever it asks of it.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "check.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo::test {

// Stream sockets. `first_bytes`: of what the first one sends and the second one has not read; 0: as usual.
inline std::pair<FileDescriptor, FileDescriptor> socket_pair(int first_bytes = 0) {
    int ends[2];
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    std::pair<FileDescriptor, FileDescriptor> pair{ends[0], ends[1]};
    if (first_bytes != 0) {
        CHECK_EQUAL(setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &first_bytes, sizeof(first_bytes)), 0);
    }
    return pair;
}

class Peer {
public:
    explicit Peer(FileDescriptor end) : end_(std::move(end)) {}

    int file() const { return end_.number(); }
    void close() { end_ = FileDescriptor(); }

    // False: the other end has gone.
    bool send(const std::string& bytes) {
        for (std::size_t at = 0; at < bytes.size();) {
            const ssize_t sent = ::send(file(), bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
            if (sent <= 0) {
                return false;
            }
            at += static_cast<std::size_t>(sent);
        }
        return true;
    }

    // Reads `count` bytes. Fewer are returned if the connection has ended.
    std::string read(std::size_t count) {
        std::string bytes(count, '\0');
        std::size_t at = 0;
        while (at < count) {
            const ssize_t came = recv(file(), bytes.data() + at, count - at, 0);
            if (came < 0 && errno == EINTR) {
                continue;
            }
            if (came <= 0) {
                break;
            }
            at += static_cast<std::size_t>(came);
        }
        bytes.resize(at);
        return bytes;
    }
    // None: it has ended, perhaps within a frame.
    std::optional<std::string> read_frame() {
        const std::string head = read(sizeof(std::uint32_t));
        if (head.size() != sizeof(std::uint32_t)) {
            return std::nullopt;
        }
        std::uint32_t size = 0;
        std::memcpy(&size, head.data(), sizeof(size));
        std::string frame = read(size);
        return frame.size() == size ? std::optional(std::move(frame)) : std::nullopt;
    }
    // Reads the bytes that are there, without waiting.
    std::string read_some() {
        char bytes[8192];
        const ssize_t came = recv(file(), bytes, sizeof(bytes), MSG_DONTWAIT);
        has_ended_ = came == 0 || (came < 0 && errno != EAGAIN && errno != EINTR);
        return {bytes, came > 0 ? static_cast<std::size_t>(came) : 0};
    }
    // Whether the last `read_some` found that the connection has ended.
    bool has_ended() const { return has_ended_; }

private:
    FileDescriptor end_;
    bool has_ended_ = false;
};

}  // namespace kvo::test
