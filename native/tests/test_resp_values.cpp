#include "link/resp_values.hpp"

#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.hpp"
#include "shim/file_descriptor.hpp"

using namespace kvo;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kHead = 10;

// A socket with what reads from it, and what was said at its other end.
struct Reading {
    Reading(std::size_t count, std::size_t size, std::size_t inbox_bytes = 4096)
        : bytes(count * size, 0), heads(count * kHead), digests(count), room(inbox_bytes), record_bytes(size) {
        std::array<int, 2> ends{};
        CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
        socket = FileDescriptor(ends[0]);
        other = FileDescriptor(ends[1]);
        inbox.room = room;
        for (std::size_t at = 0; at < count; ++at) {
            slots.push_back(reinterpret_cast<std::uint64_t>(bytes.data() + at * size));
        }
    }

    void say(std::string_view text) const {
        while (!text.empty()) {
            const ssize_t sent = send(other.number(), text.data(), text.size(), MSG_NOSIGNAL);
            CHECK(sent > 0);
            text.remove_prefix(static_cast<std::size_t>(sent));
        }
    }

    Result<std::size_t> read(std::chrono::milliseconds each = 60s) {
        return receive_values(socket.number(), inbox, {kHead, {slots, record_bytes}}, heads, digests, each);
    }

    std::string left() const {
        return {room.begin() + static_cast<std::ptrdiff_t>(inbox.first),
                room.begin() + static_cast<std::ptrdiff_t>(inbox.last)};
    }

    std::string record(std::size_t at) const { return {bytes.data() + at * record_bytes, record_bytes}; }

    FileDescriptor socket, other;
    std::string bytes;
    std::vector<std::uint8_t> heads;
    std::vector<RunDigest> digests;
    std::vector<std::uint8_t> room;
    std::size_t record_bytes;
    std::vector<std::uint64_t> slots;
    RespInbox inbox;
};

std::string head_of(std::size_t at) { return "head" + std::to_string(100'000 + at); }

std::string record_of(std::size_t at, std::size_t size) {
    std::string record(size, 'a');
    for (std::size_t byte = 0; byte < size; ++byte) {
        record[byte] = static_cast<char>(byte * 31 + at * 7 + byte / 253);
    }
    return record;
}

std::string value_of(std::size_t at, std::size_t size) {
    return "$" + std::to_string(kHead + size) + "\r\n" + head_of(at) + record_of(at, size) + "\r\n";
}

void check_came(const Reading& reading, std::size_t count) {
    for (std::size_t at = 0; at < count; ++at) {
        const std::string wanted = record_of(at, reading.record_bytes);
        CHECK(std::string(reading.heads.begin() + static_cast<std::ptrdiff_t>(at * kHead),
                          reading.heads.begin() + static_cast<std::ptrdiff_t>((at + 1) * kHead)) == head_of(at));
        CHECK(reading.record(at) == wanted);
        CHECK(reading.digests[at] ==
              digest_run({reinterpret_cast<const std::uint8_t*>(wanted.data()), wanted.size()}, 0));
    }
}

}  // namespace

TEST(values_come_to_their_slots_from_whatever_pieces) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{100}, std::size_t{70'000}, std::size_t{1'500'000}}) {
        Reading reading(5, size);
        std::string text;
        for (std::size_t at = 0; at < 5; ++at) {
            text += value_of(at, size);
        }
        std::thread sender([&] { reading.say(text); });
        const Result<std::size_t> came = reading.read();
        sender.join();
        CHECK(came.ok());
        CHECK_EQUAL(came.value(), std::size_t{5});
        check_came(reading, 5);
        CHECK(reading.left().empty());
    }
}

TEST(values_may_be_cut_anywhere) {
    const std::string text = value_of(0, 30) + value_of(1, 30);
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
        Reading reading(2, 30);
        // The first part is there already, as far as an inbox that others have filled holds it.
        std::ranges::copy(text.substr(0, cut), reading.room.begin());
        reading.inbox.last = cut;
        reading.say(text.substr(cut));
        const Result<std::size_t> came = reading.read();
        CHECK(came.ok());
        CHECK_EQUAL(came.value(), std::size_t{2});
        check_came(reading, 2);
    }
}

TEST(an_answer_of_another_kind_is_left_where_it_is) {
    for (const std::string other : {"$-1\r\n", "-ERR no\r\n", "$39\r\n", "$400\r\n", ":40\r\n", "$40\n\r", "\r\n"}) {
        Reading reading(3, 30);
        reading.say(value_of(0, 30) + other);
        const Result<std::size_t> came = reading.read();
        CHECK(came.ok());
        CHECK_EQUAL(came.value(), std::size_t{1});
        check_came(reading, 1);
        // Not all bytes have come yet, as the reader has not waited for them.
        const std::string left = reading.left();
        CHECK(!left.empty() && other.starts_with(left));
    }
}

TEST(what_comes_behind_the_last_value_is_left_for_others) {
    Reading reading(1, 30);
    reading.say(value_of(0, 30) + "+OK\r\n");
    CHECK(reading.read().ok());
    std::string left = reading.left();
    std::array<char, 16> rest{};
    const ssize_t more = recv(reading.socket.number(), rest.data(), rest.size(), MSG_DONTWAIT);
    left.append(rest.data(), more > 0 ? static_cast<std::size_t>(more) : 0);
    CHECK(left == "+OK\r\n");
}

TEST(a_value_without_an_end_is_a_fault) {
    Reading reading(1, 30);
    std::string text = value_of(0, 30);
    text[text.size() - 1] = 'x';
    reading.say(text);
    const Result<std::size_t> came = reading.read();
    CHECK(!came.ok());
    CHECK(came.fault().code() == Code::failed);
}

TEST(whoever_hangs_up_or_is_late_is_told_apart) {
    Reading gone(1, 30);
    gone.say("$40\r\nhea");
    gone.other = FileDescriptor();
    const Result<std::size_t> none = gone.read();
    CHECK(!none.ok());
    CHECK(none.fault().code() == Code::failed);

    Reading late(1, 30);
    const timeval wait{0, 1000};
    CHECK_EQUAL(setsockopt(late.socket.number(), SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait), 0);
    late.say("$40\r\nhea");
    const Result<std::size_t> waited = late.read();
    CHECK(!waited.ok());
    CHECK(waited.fault().code() == Code::unavailable);
}

TEST(a_value_that_comes_bit_by_bit_has_a_time_of_its_own) {
    Reading reading(1, 30);
    reading.say(value_of(0, 30));
    const Result<std::size_t> came = reading.read(0ms);
    CHECK(!came.ok());
    CHECK(came.fault().code() == Code::unavailable);
}

TEST(an_inbox_that_holds_no_head_is_refused) {
    Reading reading(1, 30, 20);
    const Result<std::size_t> came = reading.read();
    CHECK(!came.ok());
    CHECK(came.fault().code() == Code::invalid);
}
