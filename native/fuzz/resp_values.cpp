// Answers of a Valkey server to reads of records: values of the requested length, and anything else.
#include "link/resp_values.hpp"

#include <sys/socket.h>

#include <array>
#include <string>
#include <utility>

#include "check.hpp"
#include "shim/file_descriptor.hpp"
#include "target.hpp"

using namespace kvo;

namespace {

constexpr std::size_t kMost = 100 << 10;  // what a socket takes without a reader
constexpr std::size_t kInboxBytes = 300, kSlots = 4;

void add_value(fuzz::Bytes& said, std::size_t size) {
    const std::string line = "$" + std::to_string(size) + "\r\n";
    said.insert(said.end(), line.begin(), line.end());
    said.insert(said.end(), size, 'v');
    said.push_back('\r');
    said.push_back('\n');
}

fuzz::Bytes seed_of(std::uint8_t head, std::uint16_t record, std::uint8_t early, const fuzz::Bytes& said) {
    fuzz::Output output;
    output.number(head).number(record).number(early).add(said);
    return output.bytes();
}

}  // namespace

// The lengths of a head and a record, how much lies in the inbox already, and what is said.
std::vector<fuzz::Bytes> fuzz::make_seeds() {
    std::vector<Bytes> seeds;
    for (const std::uint16_t record : {std::uint16_t{0}, std::uint16_t{1}, std::uint16_t{400}, std::uint16_t{9000}}) {
        for (const std::uint8_t early : {std::uint8_t{0}, std::uint8_t{5}, std::uint8_t{255}}) {
            Bytes said;
            for (std::size_t at = 0; at < kSlots; ++at) {
                add_value(said, 136 + std::size_t{record});
            }
            seeds.push_back(seed_of(136, record, early, said));
            const std::string none = "$-1\r\n-ERR no\r\n";
            said.insert(said.begin(), none.begin(), none.end());
            seeds.push_back(seed_of(136, record, early, said));
            add_value(said, record);
            seeds.push_back(seed_of(0, record, early, Bytes(said.begin() + static_cast<int>(none.size()), said.end())));
        }
    }
    return seeds;
}

void fuzz::run(std::span<const std::uint8_t> bytes) {
    Input input(bytes);
    const std::size_t head_bytes = input.byte(), record_bytes = input.number<std::uint16_t>();
    Bytes room(kInboxBytes);
    const std::span<const std::uint8_t> early = input.take(input.byte());
    std::ranges::copy(early, room.begin());
    const std::span<const std::uint8_t> said = input.take(kMost);

    std::array<int, 2> ends{};
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    const FileDescriptor here(ends[0]), there(ends[1]);
    CHECK_EQUAL(send(there.number(), said.data(), said.size(), MSG_NOSIGNAL), static_cast<ssize_t>(said.size()));
    // All there is lies in the socket: nothing here waits.
    CHECK_EQUAL(shutdown(there.number(), SHUT_WR), 0);

    Bytes records(kSlots * record_bytes), heads(kSlots * head_bytes);
    std::array<std::uint64_t, kSlots> slots{};
    for (std::size_t at = 0; at < kSlots; ++at) {
        slots[at] = reinterpret_cast<std::uint64_t>(records.data() + at * record_bytes);
    }
    std::array<RunDigest, kSlots> digests{};
    RespInbox inbox{room, 0, early.size()};
    const Result<std::size_t> came = receive_values(here.number(), inbox, {head_bytes, {slots, record_bytes}}, heads,
                                                    digests, std::chrono::minutes(1));
    CHECK(inbox.first <= inbox.last && inbox.last <= room.size());
    if (!came.ok()) {
        CHECK(came.fault().message().find('\n') == std::string::npos);
        return;
    }
    CHECK(came.value() <= kSlots);
    for (std::size_t at = 0; at < came.value(); ++at) {
        CHECK(digests[at] == digest_run(std::span(records).subspan(at * record_bytes, record_bytes), 0));
    }
}
