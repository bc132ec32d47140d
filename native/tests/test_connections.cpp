#include "shim/connections.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "check.hpp"
#include "shim/file_descriptor.hpp"

using namespace kvo;

namespace {

struct Listener {
    Listener(int domain, int type)
        : domain_(domain), type_(type), file(socket(domain, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
        sockaddr_in local{};
        local.sin_family = AF_INET;
        local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        // A Unix socket without a name gets one of its own.
        const socklen_t bytes = domain == AF_UNIX ? sizeof(sa_family_t) : sizeof(local);
        local.sin_family = static_cast<sa_family_t>(domain);
        CHECK(bind(file.number(), reinterpret_cast<const sockaddr*>(&local), bytes) == 0);
        CHECK(listen(file.number(), 1024) == 0);
        CHECK(getsockname(file.number(), reinterpret_cast<sockaddr*>(&address_), &address_bytes_) == 0);
    }

    FileDescriptor connect_one() const {
        FileDescriptor end(socket(domain_, type_ | SOCK_CLOEXEC, 0));
        CHECK(connect(end.number(), reinterpret_cast<const sockaddr*>(&address_), address_bytes_) == 0);
        return end;
    }

private:
    int domain_;
    int type_;
    sockaddr_storage address_{};
    socklen_t address_bytes_ = sizeof(address_);

public:
    FileDescriptor file;
};

// A packet without bytes, with a descriptor in it.
void send_descriptor(int end) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
    iovec none{};
    msghdr message{};
    message.msg_iov = &none;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    const int sent = 0;
    std::memcpy(CMSG_DATA(head), &sent, sizeof(int));
    CHECK(sendmsg(end, &message, 0) == 0);
}

}  // namespace

TEST(connections_that_are_closed_are_let_go_of) {
    for (const auto& [domain, type] :
         {std::pair{AF_UNIX, SOCK_SEQPACKET}, std::pair{AF_UNIX, SOCK_STREAM}, std::pair{AF_INET, SOCK_STREAM}}) {
        const Listener listener(domain, type);
        CHECK(accept_open(listener.file.number()) == -EAGAIN);
        for (int closed = 0; closed < 20; ++closed) {
            listener.connect_one();
        }
        const FileDescriptor open = listener.connect_one();
        CHECK(send(open.number(), "x", 1, 0) == 1);
        const FileDescriptor accepted(accept_open(listener.file.number()));
        CHECK(accepted.is_open());
        char received = 0;
        CHECK(recv(accepted.number(), &received, 1, 0) == 1);
        CHECK(received == 'x');
        CHECK(accept_open(listener.file.number()) == -EAGAIN);
    }
}

TEST(one_call_lets_go_of_some_hundreds) {
    const Listener listener(AF_UNIX, SOCK_SEQPACKET);
    for (int closed = 0; closed < 300; ++closed) {
        listener.connect_one();
    }
    const FileDescriptor open = listener.connect_one();
    CHECK(accept_open(listener.file.number()) == -EAGAIN);
    CHECK(FileDescriptor(accept_open(listener.file.number())).is_open());
}

TEST(connections_with_something_in_them_are_accepted_though_they_are_closed) {
    const Listener listener(AF_UNIX, SOCK_SEQPACKET);
    send_descriptor(listener.connect_one().number());
    const FileDescriptor accepted(accept_open(listener.file.number()));
    CHECK(accepted.is_open());
    // Nothing was received by looking.
    const FileDescriptor next(dup(accepted.number()));
    CHECK(next.number() == accepted.number() + 1);
    int tells_sender = -1;
    socklen_t bytes = sizeof(tells_sender);
    CHECK(getsockopt(accepted.number(), SOL_SOCKET, SO_PASSCRED, &tells_sender, &bytes) == 0);
    CHECK(tells_sender == 0);
    CHECK(send(listener.connect_one().number(), "x", 1, 0) == 1);
    CHECK(FileDescriptor(accept_open(listener.file.number())).is_open());
}

TEST(what_is_no_listener_is_an_error) {
    CHECK(accept_open(-1) == -EBADF);
    CHECK(accept_open(FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC)).number()) == -ENOTSOCK);
}
