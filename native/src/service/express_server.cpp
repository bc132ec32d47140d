#include "service/express_server.hpp"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <new>
#include <system_error>

#include "base/clock.hpp"
#include "service/express_stream.hpp"
#include "shim/thread_turns.hpp"

namespace kvo {
namespace {

constexpr std::size_t kKeptBytes = 64UL << 10;  // for answers, once there was a large one
constexpr timeval kSendPatience{.tv_sec = 5, .tv_usec = 0};

// How many bytes the process can read; fewer than all: it takes no more. Waits for it, though not for ever.
std::size_t send_all(int end, const std::string& out) {
    std::size_t at = 0;
    while (at < out.size()) {
        const ssize_t sent = send(end, out.data() + at, out.size() - at, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) {
            continue;
        }
        if (sent <= 0) {
            break;
        }
        at += static_cast<std::size_t>(sent);
    }
    return at;
}

// Descriptors may lie in what was not read (before Linux 6.16), and letting go of them may take as long as the process
// likes. The event loop, which closes the socket, must find none.
void drop_unread(int end) {
    std::array<std::uint8_t, 4096> dropped;
    while (recv(end, dropped.data(), dropped.size(), MSG_DONTWAIT) > 0) {
    }
}

// Signals are for the thread that runs Python.
class WithoutSignals {
public:
    WithoutSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_{};
};

}  // namespace

ExpressServer::ExpressServer(const ExpressTerms& terms, std::size_t channel_limit, std::size_t log_limit,
                             std::uint64_t message_bytes)
    : terms_(terms), channel_limit_(channel_limit), log_(log_limit), messages_(message_bytes) {}

ExpressServer::~ExpressServer() { close(); }

std::uint64_t ExpressServer::open(FileDescriptor end, std::shared_ptr<CacheCore> core, const ExpressRights& rights,
                                  std::uint64_t domain) {
    const std::lock_guard lock(mutex_);
    reap();
    if (channels_.size() >= channel_limit_) {
        return 0;
    }
    setsockopt(end.number(), SOL_SOCKET, SO_SNDTIMEO, &kSendPatience, sizeof(kSendPatience));
    Channel& channel = channels_.emplace_back(std::move(end), std::move(core), rights, terms_, is_draining_, log_,
                                              times_, refusals_[domain], messages_);
    channel.number = ++last_;
    try {
        const WithoutSignals blocked;
        channel.thread = std::thread([&channel] { run(channel); });
    } catch (const std::system_error&) {
        channels_.pop_back();
        return 0;
    }
    pthread_setname_np(channel.thread.native_handle(), "kvo-express");
    return channel.number;
}

std::uint64_t ExpressServer::count_refusals(std::uint64_t domain, std::uint64_t code) const {
    const std::lock_guard lock(mutex_);
    const auto found = refusals_.find(domain);
    return found == refusals_.end() ? 0 : found->second.of(code);
}

void ExpressServer::end(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    for (Channel& channel : channels_) {
        if (channel.number == number) {
            stop(channel);
        }
    }
    reap();
}

void ExpressServer::tick() {
    const std::lock_guard lock(mutex_);
    reap();
}

void ExpressServer::close() {
    const std::lock_guard lock(mutex_);
    for (Channel& channel : channels_) {
        stop(channel);
    }
    for (Channel& channel : channels_) {
        channel.thread.join();
    }
    channels_.clear();
    log_.close();
}

// A socket that is shut gives out what has come before that: it alone would end nothing soon.
void ExpressServer::stop(Channel& channel) {
    channel.is_ended.store(true, std::memory_order_relaxed);
    shutdown(channel.end.number(), SHUT_RDWR);
}

// Those whose threads have nothing left to do. With the lock.
void ExpressServer::reap() {
    for (auto channel = channels_.begin(); channel != channels_.end();) {
        if (!channel->is_over.load(std::memory_order_acquire)) {
            ++channel;
            continue;
        }
        channel->thread.join();
        channel = channels_.erase(channel);
    }
}

void ExpressServer::run(Channel& channel) {
    take_short_turns();
    try {
        serve(channel);
        channel.service.settle(false);
    } catch (const std::bad_alloc&) {
        // There is no memory: the process learns of it from the end of its channel. The session keeps what was granted
        // last until it ends.
    }
    shutdown(channel.end.number(), SHUT_RDWR);
    drop_unread(channel.end.number());
    channel.is_over.store(true, std::memory_order_release);
}

void ExpressServer::serve(Channel& channel) {
    ExpressStream stream(channel.frame_bytes);
    std::string out;
    const int end = channel.end.number();
    // Long messages are held within the user's share: those that come in parts, and answers that have not been read
    // yet.
    const auto may_hold = [&] {
        return channel.held.become(stream.extra_bytes() + (out.capacity() > kKeptBytes ? out.capacity() : 0));
    };
    const auto flush = [&] {
        const std::size_t sent = may_hold() ? send_all(end, out) : 0;
        const bool is_sent = sent == out.size();
        // The process may have read a part: then leases and slots are its session's until that ends.
        if (sent != 0) {
            channel.service.settle(true);
        }
        out.clear();  // behind a part nothing is sent any more
        if (out.capacity() > kKeptBytes) {
            out.shrink_to_fit();
        }
        return is_sent;
    };
    while (may_hold()) {
        const std::span<std::uint8_t> room = stream.room();
        const ssize_t came = recv(end, room.data(), room.size(), 0);
        if (came < 0 && errno == EINTR) {
            continue;
        }
        if (came <= 0) {
            return;
        }
        stream.add(static_cast<std::size_t>(came));
        const bool goes_on = stream.take_frames([&](std::span<const std::uint8_t> frame) {
            if (channel.is_ended.load(std::memory_order_relaxed)) {
                return false;
            }
            const std::uint64_t begun_ns = now_ns();
            const bool is_served = channel.service.serve(frame, begun_ns, out);
            channel.times.add(channel.service.last_op(), now_ns() - begun_ns);
            if (const std::uint64_t code = channel.service.last_refusal(); code != 0) {
                channel.refusals.add(code);
            }
            // An answer does not wait for what came behind its call.
            return is_served && (out.empty() || flush());
        });
        if (!goes_on) {
            if (!out.empty()) {
                flush();
            }
            return;
        }
    }
}

}  // namespace kvo
