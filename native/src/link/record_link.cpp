#include "link/record_link.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/status.hpp"
#include "link/sealing.hpp"

namespace kvo {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kMostParts = 64;           // given to the system at once
constexpr std::size_t kDigestBytes = 256 << 10;  // received and summed while the processor's cache has them

std::span<const std::uint8_t> record_at(const LinkRecords& records, std::size_t at) {
    return {reinterpret_cast<const std::uint8_t*>(records.slots[at]), records.record_bytes};
}

std::span<std::uint8_t> slot_at(const LinkRecords& records, std::size_t at) {
    return {reinterpret_cast<std::uint8_t*>(records.slots[at]), records.record_bytes};
}

Status gone() { return {Code::failed, "the other side has hung up"}; }

Status late() { return {Code::unavailable, "the other side took too long"}; }

bool is_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

void put_length(std::uint8_t* out, std::size_t length) {
    for (std::size_t byte = 0; byte < kLengthBytes; ++byte) {
        out[byte] = static_cast<std::uint8_t>(length >> (8 * byte));
    }
}

std::size_t get_length(const std::uint8_t* in) {
    std::size_t length = 0;
    for (std::size_t byte = 0; byte < kLengthBytes; ++byte) {
        length |= std::size_t{in[byte]} << (8 * byte);
    }
    return length;
}

}  // namespace

RecordLink::RecordLink(FileDescriptor socket, std::optional<Sealing> seal, std::optional<Sealing> open)
    : socket_(std::move(socket)), seal_(std::move(seal)), open_(std::move(open)) {
    if (seal_) {
        sealed_.resize(kLengthBytes + kPieceBytes + kSealTagBytes);
        coming_.resize(kPieceBytes + kSealTagBytes);
    }
}

Result<RecordLink> RecordLink::make(FileDescriptor socket, const std::optional<LinkKeys>& keys) {
    const int flags = fcntl(socket.number(), F_GETFL);
    if (flags < 0 || fcntl(socket.number(), F_SETFL, flags | O_NONBLOCK) < 0) {
        return system_fault("the socket of a link", errno);
    }
    std::optional<Sealing> seal, open;
    if (keys) {
        const Result<const Libcrypto*> library = machine_libcrypto();
        if (!library.ok()) {
            return library.fault();
        }
        Result<Sealing> sends = Sealing::make(*library.value(), keys->send, Sealing::Way::seal);
        Result<Sealing> receives = Sealing::make(*library.value(), keys->receive, Sealing::Way::open);
        if (!sends.ok() || !receives.ok()) {
            return sends.ok() ? receives.fault() : sends.fault();
        }
        seal = std::move(sends.value());
        open = std::move(receives.value());
    }
    return RecordLink(std::move(socket), std::move(seal), std::move(open));
}

Status RecordLink::send(std::span<const std::uint8_t> head, const LinkRecords& records, Instant deadline) {
    return seal_ ? send_sealed(head, records, deadline) : send_plain(head, records, deadline);
}

Status RecordLink::send_plain(std::span<const std::uint8_t> head, const LinkRecords& records, Instant deadline) {
    // The parts to send are the head and the records. `at` is the current part, and `done` is how many of its bytes
    // were sent.
    const std::size_t count = records.record_bytes == 0 ? 0 : records.slots.size();
    std::size_t at = 0, done = 0;
    const auto part = [&](std::size_t number) { return number == 0 ? head : record_at(records, number - 1); };
    while (at <= count) {
        // Checked even if the other side never makes us wait.
        if (Clock::now() >= deadline) {
            return late();
        }
        std::array<iovec, kMostParts> parts;
        std::size_t used = 0;
        for (std::size_t next = at; next <= count && used < kMostParts; ++next) {
            const std::span<const std::uint8_t> bytes = part(next).subspan(next == at ? done : 0);
            if (!bytes.empty()) {
                parts[used++] = {const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
            }
        }
        if (used == 0) {
            return {};
        }
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = used;
        const ssize_t sent = sendmsg(socket_.number(), &message, MSG_NOSIGNAL);
        if (sent < 0 && is_wait(errno)) {
            if (Status status = wait(POLLOUT, deadline); !status.ok()) {
                return status;
            }
            continue;
        }
        if (sent < 0 && errno == EINTR) {
            continue;
        }
        if (sent < 0) {
            return system_fault("the other side takes nothing", errno);
        }
        done += static_cast<std::size_t>(sent);
        while (at <= count && done >= part(at).size()) {
            done -= part(at++).size();
        }
    }
    return {};
}

Status RecordLink::send_sealed(std::span<const std::uint8_t> head, const LinkRecords& records, Instant deadline) {
    std::size_t size = 0;  // of the piece so far
    const auto add = [&](std::span<const std::uint8_t> bytes) -> Status {
        while (!bytes.empty()) {
            if (size == 0) {
                if (Status status = seal_->begin(); !status.ok()) {
                    return status;
                }
            }
            const std::size_t room = std::min(bytes.size(), kPieceBytes - size);
            if (Status status = seal_->run(bytes.first(room), sealed_.data() + kLengthBytes + size); !status.ok()) {
                return status;
            }
            size += room;
            bytes = bytes.subspan(room);
            if (size == kPieceBytes) {
                if (Status status = send_piece(std::exchange(size, 0), deadline); !status.ok()) {
                    return status;
                }
            }
        }
        return {};
    };
    const auto end = [&]() { return size == 0 ? Status() : send_piece(std::exchange(size, 0), deadline); };
    if (Status status = add(head); !status.ok()) {
        return status;
    }
    // The head is a piece of its own, so the receiver can open the records' pieces straight into their slots.
    if (Status status = end(); !status.ok()) {
        return status;
    }
    for (std::size_t at = 0; at < records.slots.size(); ++at) {
        if (Status status = add(record_at(records, at)); !status.ok()) {
            return status;
        }
    }
    return end();
}

Status RecordLink::send_piece(std::size_t size, Instant deadline) {
    const Result<SealTag> tag = seal_->finish();
    if (!tag.ok()) {
        return tag.fault();
    }
    put_length(sealed_.data(), size);
    std::memcpy(sealed_.data() + kLengthBytes + size, tag.value().data(), kSealTagBytes);
    return write_all({sealed_.data(), kLengthBytes + size + kSealTagBytes}, deadline);
}

Status RecordLink::write_all(std::span<const std::uint8_t> bytes, Instant deadline) {
    return send_plain(bytes, {}, deadline);
}

Status RecordLink::receive(std::span<std::uint8_t> out, Instant deadline) {
    return open_ ? receive_sealed(out, deadline) : read_all(out, deadline);
}

Status RecordLink::receive_records(const LinkRecords& records, std::span<RunDigest> digests, Instant deadline) {
    for (std::size_t at = 0; at < records.slots.size(); ++at) {
        const Result<RunDigest> digest = receive_record(slot_at(records, at), deadline);
        if (!digest.ok()) {
            return digest.fault();
        }
        digests[at] = digest.value();
    }
    return {};
}

Result<CameCoded> RecordLink::receive_coded_records(const LinkRecords& records, std::span<CameRecord> came,
                                                    Instant deadline) {
    CameCoded told;
    std::unique_ptr<std::uint8_t[]> coming;
    for (std::size_t at = 0; at < records.slots.size(); ++at) {
        const std::span<std::uint8_t> slot = slot_at(records, at);
        std::array<std::uint8_t, kLengthBytes> length{};
        if (Status status = receive(length, deadline); !status.ok()) {
            return status;
        }
        const std::size_t size = get_length(length.data());
        if (size == 0) {
            const Result<RunDigest> digest = receive_record(slot, deadline);
            if (!digest.ok()) {
                return digest.fault();
            }
            came[at] = {digest.value(), true};
            continue;
        }
        // So nothing is ever read, or given room, that is longer than what was asked for.
        if (size >= slot.size()) {
            return Status{Code::failed, "the other side codes records of " + std::to_string(slot.size()) +
                                            " bytes in " + std::to_string(size)};
        }
        if (!coming) {
            coming = std::make_unique_for_overwrite<std::uint8_t[]>(slot.size());
        }
        const std::span<std::uint8_t> coded(coming.get(), size);
        if (Status status = receive(coded, deadline); !status.ok()) {
            return status;
        }
        if (!codec_) {
            codec_ = std::make_unique<BackgroundCodec>();
        }
        const Instant begun = Clock::now();
        const bool is_whole = codec_->decode(coded, slot);
        told.decoding += Clock::now() - begun;
        told.records += 1;
        told.coded_bytes += size;
        came[at] = {is_whole ? digest_run(slot, 0) : RunDigest(), is_whole};
    }
    return told;
}

// One record, and what its bytes sum to.
Result<RunDigest> RecordLink::receive_record(std::span<std::uint8_t> slot, Instant deadline) {
    RunDigest total;
    for (std::size_t from = 0; from < slot.size(); from += kDigestBytes) {
        const std::span<std::uint8_t> part = slot.subspan(from, std::min(kDigestBytes, slot.size() - from));
        if (Status status = receive(part, deadline); !status.ok()) {
            return status;
        }
        total = combine(total, digest_run(part, from));
    }
    return total;
}

Status RecordLink::read_all(std::span<std::uint8_t> out, Instant deadline) {
    while (!out.empty()) {
        if (Clock::now() >= deadline) {
            return late();
        }
        const ssize_t got = recv(socket_.number(), out.data(), out.size(), 0);
        if (got > 0) {
            out = out.subspan(static_cast<std::size_t>(got));
        } else if (got == 0) {
            return gone();
        } else if (is_wait(errno)) {
            if (Status status = wait(POLLIN, deadline); !status.ok()) {
                return status;
            }
        } else if (errno != EINTR) {
            return system_fault("nothing comes from the other side", errno);
        }
    }
    return {};
}

Status RecordLink::receive_sealed(std::span<std::uint8_t> out, Instant deadline) {
    const std::size_t left = std::min(out.size(), opened_.size() - opened_from_);
    if (left != 0) {
        std::memcpy(out.data(), opened_.data() + opened_from_, left);
        opened_from_ += left;
        out = out.subspan(left);
    }
    while (!out.empty()) {
        if (Status status = open_piece(out, deadline); !status.ok()) {
            return status;
        }
    }
    return {};
}

// The next piece to the beginning of `out`, which is then what is left of it.
Status RecordLink::open_piece(std::span<std::uint8_t>& out, Instant deadline) {
    std::array<std::uint8_t, kLengthBytes> length{};
    if (Status status = read_all(length, deadline); !status.ok()) {
        return status;
    }
    const std::size_t size = get_length(length.data());
    if (size == 0 || size > kPieceBytes) {
        return {Code::failed, "the other side sends pieces of " + std::to_string(size) + " bytes"};
    }
    if (Status status = read_all({coming_.data(), size + kSealTagBytes}, deadline); !status.ok()) {
        return status;
    }
    SealTag tag;
    std::memcpy(tag.data(), coming_.data() + size, tag.size());
    const std::size_t direct = std::min(size, out.size());
    opened_.resize(size - direct);
    opened_from_ = 0;
    Status status = open_->begin();
    if (status.ok()) {
        status = open_->run({coming_.data(), direct}, out.data());
    }
    if (status.ok()) {
        status = open_->run({coming_.data() + direct, size - direct}, opened_.data());
    }
    if (status.ok()) {
        status = open_->check(tag);
    }
    if (status.ok()) {
        out = out.subspan(direct);
    }
    return status;
}

Status RecordLink::wait(short events, Instant deadline) {
    for (;;) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
        if (left <= 0) {
            return late();
        }
        pollfd waited{socket_.number(), events, 0};
        const int ready = poll(&waited, 1, static_cast<int>(std::min<std::int64_t>(left, 1'000'000)));
        if (ready > 0) {
            return {};
        }
        if (ready < 0 && errno != EINTR) {
            return system_fault("waiting for the other side", errno);
        }
    }
}

void RecordLink::shut() noexcept { ::shutdown(socket_.number(), SHUT_RDWR); }

}  // namespace kvo
