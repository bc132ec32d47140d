// A link between servers: what the other end sends, plain or in sealed pieces, and of these also such as it alone could
// make that knows the keys.
#include "link/record_link.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "check.hpp"
#include "target.hpp"

using namespace kvo;

namespace {

constexpr std::uint8_t kSealed = 1, kRecords = 2;
constexpr std::size_t kMost = 150 << 10;  // what a socket takes without a reader

LinkKeys keys_of(std::uint8_t send, std::uint8_t receive) {
    LinkKeys keys;
    keys.send.fill(send);
    keys.receive.fill(receive);
    return keys;
}

struct Ends {
    Ends() {
        std::array<int, 2> ends{};
        CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
        here = FileDescriptor(ends[0]);
        there = FileDescriptor(ends[1]);
        const int bytes = 1 << 20;
        CHECK_EQUAL(setsockopt(there.number(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes)), 0);
    }
    FileDescriptor here, there;
};

// Sends as the other end: sealed pieces by a link of its own, or bytes as they are.
void send_all(fuzz::Input& input, const FileDescriptor& end, bool is_sealed) {
    auto link = RecordLink::make(FileDescriptor(fcntl(end.number(), F_DUPFD_CLOEXEC, 0)),
                                 is_sealed ? std::optional(keys_of(2, 1)) : std::nullopt);
    CHECK(link.ok());
    std::size_t sent = 0;
    while (!input.is_empty() && sent < kMost) {
        const std::uint8_t kind = input.byte() % 3;
        const auto size = input.number<std::uint16_t>();
        const fuzz::Bytes filler(kind == 2 ? size * std::size_t{4} : 0, 'f');
        const std::span<const std::uint8_t> bytes = kind == 2 ? std::span(filler) : input.take(size);
        sent += bytes.size() + 64;
        if (kind == 0) {
            CHECK(link.value().send(bytes, {}, RecordLink::Clock::now() + std::chrono::seconds(60)).ok());
        } else if (!bytes.empty()) {
            // Bytes for which the socket has no room are left out.
            static_cast<void>(send(end.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
        }
    }
}

}  // namespace

// How it is read (a style, and sizes), and what comes.
std::vector<fuzz::Bytes> fuzz::make_seeds() {
    std::vector<Bytes> seeds;
    const Bytes text(300, 'a');
    for (std::uint8_t style = 0; style < 4; ++style) {
        Output output;
        output.number(style).number<std::uint8_t>(2).number<std::uint16_t>(100).number<std::uint16_t>(150);
        output.number<std::uint8_t>(0).number<std::uint16_t>(200).add(std::span(text).first(200));
        output.number<std::uint8_t>(0).number<std::uint16_t>(300).add(text);
        output.number<std::uint8_t>(1).number<std::uint16_t>(8).number<std::uint32_t>(1 << 17).number(~0U);
        seeds.push_back(output.bytes());
        Output longest;  // of one piece more than a piece may have
        longest.number(style).number<std::uint8_t>(0).number<std::uint16_t>(UINT16_MAX);
        longest.number<std::uint8_t>(1).number<std::uint16_t>(4).number<std::uint32_t>((1 << 17) + 4096);
        longest.number<std::uint8_t>(2).number<std::uint16_t>(((1 << 17) + 8192) / 4);
        seeds.push_back(longest.bytes());
    }
    return seeds;
}

void fuzz::run(std::span<const std::uint8_t> bytes) {
    Input input(bytes);
    const std::uint8_t style = input.byte();
    const bool is_sealed = (style & kSealed) != 0;
    std::vector<std::size_t> sizes(1 + input.byte() % 4);
    for (std::size_t& size : sizes) {
        size = input.number<std::uint16_t>();
    }
    Ends ends;
    auto made = RecordLink::make(std::move(ends.here), is_sealed ? std::optional(keys_of(1, 2)) : std::nullopt);
    CHECK(made.ok());
    send_all(input, ends.there, is_sealed);
    CHECK_EQUAL(shutdown(ends.there.number(), SHUT_WR), 0);
    // All there is lies in the socket: nothing here waits.
    const auto deadline = RecordLink::Clock::now() + std::chrono::seconds(60);
    Status status;
    for (std::size_t at = 0; at < 64 && status.ok(); ++at) {
        const std::size_t size = sizes[at % sizes.size()];
        if ((style & kRecords) == 0) {
            Bytes out(size);
            status = made.value().receive(out, deadline);
            continue;
        }
        Bytes out(2 * size);
        const auto address = reinterpret_cast<std::uint64_t>(out.data());
        const std::array<std::uint64_t, 2> slots = {address + size, address};
        std::array<RunDigest, 2> digests{};
        status = made.value().receive_records({slots, size}, digests, deadline);
        if (status.ok() && size != 0) {
            const RunDigest wanted = digest_run(std::span(out).first(size), 0);
            CHECK(digests[1].low == wanted.low);
        }
    }
    CHECK(status.ok() || status.message().find('\n') == std::string::npos);
}
