#include "link/resp_values.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/status.hpp"

namespace kvo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kEndBytes = 2;
constexpr std::size_t kMostLineBytes = 32;

class ValueReader {
public:
    ValueReader(int socket, RespInbox& inbox, std::size_t head_bytes, std::size_t record_bytes)
        : socket_(socket),
          inbox_(inbox),
          line_("$" + std::to_string(head_bytes + record_bytes) + "\r\n"),
          head_bytes_(head_bytes) {}

    void begin(std::chrono::milliseconds time) { deadline_ = Clock::now() + time; }

    // Whether the next answer is a value of the length that is wanted; its line is taken then.
    Result<bool> take_line() {
        for (;;) {
            const std::size_t seen = std::min(here(), line_.size());
            if (std::memcmp(next(), line_.data(), seen) != 0) {
                return false;
            }
            if (seen == line_.size()) {
                inbox_.first += seen;
                return true;
            }
            if (Status status = receive({}, line_.size() + head_bytes_); !status.ok()) {
                return status;
            }
        }
    }

    Status take_head(std::span<std::uint8_t> head) {
        while (here() < head.size()) {
            if (Status status = receive({}, head.size()); !status.ok()) {
                return status;
            }
        }
        std::copy_n(next(), head.size(), head.data());
        inbox_.first += head.size();
        return {};
    }

    // A record and what ends its value.
    Status take_record(std::span<std::uint8_t> slot) {
        const std::size_t had = std::min(here(), slot.size());
        std::copy_n(next(), had, slot.data());
        inbox_.first += had;
        std::size_t done = had;
        // With it comes what stands before the next record, which so needs no call of its own.
        const std::size_t behind = kEndBytes + line_.size() + head_bytes_;
        while (done < slot.size() || here() < kEndBytes) {
            if (Status status = receive(slot.subspan(done), behind); !status.ok()) {
                return status;
            }
            done += came_;
        }
        if (next()[0] != '\r' || next()[1] != '\n') {
            return {Code::failed, "it does not speak as it should: a value without an end"};
        }
        inbox_.first += kEndBytes;
        return {};
    }

private:
    std::size_t here() const { return inbox_.last - inbox_.first; }
    const std::uint8_t* next() const { return inbox_.room.data() + inbox_.first; }

    // At least one byte: first to `out`, of which `came_` are filled then, and what is more to the inbox until it holds
    // `wanted`.
    Status receive(std::span<std::uint8_t> out, std::size_t wanted) {
        if (inbox_.first != 0) {
            std::memmove(inbox_.room.data(), next(), here());
            inbox_.last = here();
            inbox_.first = 0;
        }
        const std::size_t room = std::min(wanted, inbox_.room.size()) - inbox_.last;
        std::array<iovec, 2> parts{{{out.data(), out.size()}, {inbox_.room.data() + inbox_.last, room}}};
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = parts.size();
        for (;;) {
            const ssize_t got = recvmsg(socket_, &message, 0);
            if (got < 0 && errno == EINTR && Clock::now() < deadline_) {
                continue;
            }
            if (got == 0) {
                return {Code::failed, "it has hung up"};
            }
            if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
                return system_fault("nothing comes", errno);
            }
            // Also where something comes now and then.
            if (got < 0 || Clock::now() >= deadline_) {
                return {Code::unavailable, "it took too long"};
            }
            came_ = std::min(static_cast<std::size_t>(got), out.size());
            inbox_.last += static_cast<std::size_t>(got) - came_;
            return {};
        }
    }

    const int socket_;
    RespInbox& inbox_;
    const std::string line_;
    const std::size_t head_bytes_;
    Clock::time_point deadline_;
    std::size_t came_ = 0;
};

}  // namespace

Result<std::size_t> receive_values(int socket, RespInbox& inbox, const RespValues& values,
                                   std::span<std::uint8_t> heads, std::span<RunDigest> digests,
                                   std::chrono::milliseconds each) {
    const LinkRecords& records = values.records;
    if (inbox.first > inbox.last || inbox.last > inbox.room.size() ||
        inbox.room.size() < values.head_bytes + kMostLineBytes + kEndBytes ||
        heads.size() != records.slots.size() * values.head_bytes || digests.size() != records.slots.size()) {
        return Status{Code::invalid, "the inbox or the heads are too small"};
    }
    ValueReader reader(socket, inbox, values.head_bytes, records.record_bytes);
    for (std::size_t at = 0; at < records.slots.size(); ++at) {
        reader.begin(each);
        const Result<bool> is_next = reader.take_line();
        if (!is_next.ok()) {
            return is_next.fault();
        }
        if (!is_next.value()) {
            return at;
        }
        const std::span slot(reinterpret_cast<std::uint8_t*>(records.slots[at]), records.record_bytes);
        Status status = reader.take_head(heads.subspan(at * values.head_bytes, values.head_bytes));
        if (status.ok()) {
            status = reader.take_record(slot);
        }
        if (!status.ok()) {
            return status;
        }
        digests[at] = digest_run(slot, 0);  // while the processor's cache has it
    }
    return records.slots.size();
}

}  // namespace kvo
