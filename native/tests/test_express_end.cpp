#include "service/express_end.hpp"

#include <sys/socket.h>

#include <future>

#include "express_peer.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kFrameBytes = 2 << 20;
constexpr std::uint64_t kForEver = UINT64_MAX;

std::span<const std::uint8_t> bytes_in(const std::string& text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

std::string pack(const std::string& frame) {
    const auto size = static_cast<std::uint32_t>(frame.size());
    return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + frame;
}

std::string body(std::size_t size, std::size_t seed) {
    std::string bytes(size, '\0');
    for (std::size_t i = 0; i < size; ++i) {
        bytes[i] = static_cast<char>(i * 13 + seed + (i >> 8));
    }
    return bytes;
}

struct Ends {
    explicit Ends(int buffer_bytes = 0) : Ends(socket_pair(buffer_bytes)) {}
    explicit Ends(std::pair<FileDescriptor, FileDescriptor> pair)
        : end(std::move(pair.first), kFrameBytes), peer(std::move(pair.second)) {}

    bool receive() {
        return end.receive([&](std::span<const std::uint8_t> frame) {
            frames.emplace_back(frame.begin(), frame.end());
            return true;
        });
    }
    // Until nothing comes any more, which must be soon.
    void receive_all() {
        while (receive()) {
            end.wait(-1, kForEver);
        }
    }
    // Sends until the end takes no more at once.
    std::string send_until_full() {
        std::string sent;
        while (!end.has_unsent()) {
            const std::string frame = body(3000, sent.size());
            CHECK(end.send(bytes_in(frame)));
            sent += pack(frame);
        }
        return sent;
    }

    ExpressEnd end;
    Peer peer;
    std::vector<std::string> frames;
};

}  // namespace

TEST(frames_go_and_come) {
    Ends ends;
    const std::vector<std::string> sent = {"one", "", body(1000, 1)};
    for (const std::string& frame : sent) {
        CHECK(ends.end.send(bytes_in(frame)));
        CHECK(!ends.end.has_unsent());
    }
    for (const std::string& frame : sent) {
        CHECK(ends.peer.read_frame() == frame);
    }
    CHECK(ends.receive());  // nothing has come, and that is no end
    CHECK(ends.frames.empty());
    CHECK(ends.peer.send(pack("one") + pack("") + pack("two").substr(0, 5)));
    CHECK(ends.receive());
    CHECK((ends.frames == std::vector<std::string>{"one", ""}));
    CHECK(ends.peer.send(pack("two").substr(5)));
    CHECK(ends.receive());
    CHECK_EQUAL(ends.frames.size(), 3u);
    CHECK_EQUAL(ends.frames[2], "two");
}

TEST(frames_of_all_sizes_come_whole) {
    Ends ends;
    std::vector<std::string> sent;
    std::string bytes;
    for (const std::size_t size : {0UL, 65528UL, 65532UL, 65536UL, 200'000UL, kFrameBytes, 1UL, 131'064UL}) {
        sent.push_back(body(size, size));
        bytes += pack(sent.back());
    }
    auto all = std::async(std::launch::async, [&] {
        const bool is_sent = ends.peer.send(bytes);
        shutdown(ends.peer.file(), SHUT_WR);
        return is_sent;
    });
    ends.receive_all();
    CHECK(all.get());
    CHECK(ends.frames == sent);
}

TEST(all_that_has_come_is_received_at_once) {
    Ends ends;
    std::string bytes;
    for (std::size_t i = 0; i < 100; ++i) {
        bytes += pack(body(1000, i));
    }
    CHECK(ends.peer.send(bytes));  // more than there is room for at first
    CHECK(ends.receive());
    CHECK_EQUAL(ends.frames.size(), 100u);
}

TEST(what_the_other_end_does_not_take_goes_out_when_it_reads) {
    Ends ends(4096);
    const std::string sent = ends.send_until_full();
    CHECK(ends.end.flush() && ends.end.has_unsent());
    CHECK(ends.receive());  // which tries too
    std::string came;
    while (came.size() < sent.size()) {
        came += ends.peer.read_some();
        CHECK(ends.end.flush());
    }
    CHECK(came == sent);
    CHECK(!ends.end.has_unsent());
    // Receiving sends waiting bytes as well.
    const std::string again = ends.send_until_full();
    for (came.clear(); came.size() < again.size();) {
        came += ends.peer.read_some();
        CHECK(ends.receive());
    }
    CHECK(came == again);
    CHECK(!ends.end.has_unsent());
}

TEST(what_is_kept_to_be_sent_has_a_bound) {
    Ends ends;
    const std::string frame = body(1 << 20, 1);
    std::size_t taken = 0;
    while (ends.end.send(bytes_in(frame))) {
        CHECK(++taken <= 33);
    }
    CHECK(taken >= 31);
    CHECK(!ends.end.send(bytes_in(frame)));
    CHECK(ends.end.has_unsent());
    // No byte of the refused frame goes out.
    auto read = std::async(std::launch::async, [&] { return ends.peer.read(taken * pack(frame).size()); });
    while (ends.end.has_unsent()) {
        ends.end.wait(-1, kForEver);
        CHECK(ends.end.flush());
    }
    const std::string came = read.get();
    for (std::size_t i = 0; i < taken; ++i) {
        CHECK(came.substr(i * pack(frame).size(), pack(frame).size()) == pack(frame));
    }
    CHECK(ends.peer.read_some().empty());
    CHECK(ends.end.send(bytes_in(frame)));
}

TEST(what_came_before_the_end_is_delivered) {
    Ends ends;
    CHECK(ends.peer.send(pack("last") + pack("words") + pack("torn").substr(0, 6)));
    ends.peer.close();
    ends.receive_all();
    CHECK((ends.frames == std::vector<std::string>{"last", "words"}));
    CHECK(!ends.receive());
    CHECK_EQUAL(ends.frames.size(), 2u);
    CHECK(!ends.end.send(bytes_in("x")));  // and no signal
    CHECK(!ends.end.send(bytes_in("x")));
}

TEST(what_came_is_delivered_though_nothing_can_be_sent) {
    Ends ends(4096);
    ends.send_until_full();
    CHECK(ends.peer.send(pack("last") + pack("words")));
    ends.peer.close();
    CHECK(!ends.receive());
    CHECK((ends.frames == std::vector<std::string>{"last", "words"}));
    CHECK(!ends.end.flush());
    CHECK(!ends.receive());
    CHECK_EQUAL(ends.frames.size(), 2u);
}

TEST(it_ends_where_a_frame_is_too_large_or_nobody_wants_more) {
    Ends ends;
    const auto size = static_cast<std::uint32_t>(kFrameBytes + 1);
    CHECK(ends.peer.send(pack("good") + std::string(reinterpret_cast<const char*>(&size), sizeof(size))));
    CHECK(!ends.receive());
    CHECK_EQUAL(ends.frames.size(), 1u);

    Ends others;
    CHECK(others.peer.send(pack("one") + pack("two")));
    CHECK(!others.end.receive([](std::span<const std::uint8_t> frame) {
        CHECK_EQUAL(frame.size(), 3u);
        return frame[0] != 'o';
    }));
}

TEST(whoever_waits_wakes_up_for_all_that_can_be_done) {
    Ends ends(4096);
    ends.end.wait(-1, 0);  // nothing, and at once
    CHECK(ends.peer.send(pack("x")));
    ends.end.wait(-1, kForEver);
    CHECK(ends.receive());
    CHECK_EQUAL(ends.frames.size(), 1u);
    ends.send_until_full();
    while (!ends.peer.read_some().empty()) {
    }
    ends.end.wait(-1, kForEver);  // it can send again
    CHECK(ends.end.flush());
    ends.peer.close();
    ends.receive_all();
}

TEST(a_short_wait_hears_of_what_comes_and_ends_by_itself) {
    constexpr std::uint64_t kShort = 150'000;
    Ends ends;
    ends.end.wait(-1, kShort);
    CHECK(ends.receive());
    CHECK(ends.frames.empty());
    auto writing = std::async(std::launch::async, [&] { CHECK(ends.peer.send(pack("x"))); });
    while (ends.frames.empty()) {
        ends.end.wait(-1, kShort);
        CHECK(ends.receive());
    }
    writing.get();
    CHECK_EQUAL(ends.frames.size(), 1u);
}

TEST(long_frames_go_whole_whatever_the_socket_takes_at_once) {
    Ends ends(4096);
    std::string read;
    std::string sent;
    for (std::size_t i = 0; i < 40; ++i) {
        const std::string frame = body(5000 + 1371 * i, i + 1);
        CHECK(ends.end.send(bytes_in(frame)));
        sent += pack(frame);
        if (i % 3 != 0) {
            read += ends.peer.read_some();
        }
    }
    while (read.size() < sent.size()) {
        read += ends.peer.read_some();
        CHECK(ends.end.flush());
    }
    CHECK(read == sent);
    CHECK(!ends.end.has_unsent());
}

TEST(looking_before_sleep_pauses_where_it_was_in_vain) {
    kvo::LookBeforeSleep look;
    CHECK(look.is_worth());
    CHECK(look.is_worth());
    look.was_in_vain();
    for (unsigned i = 0; i < kvo::LookBeforeSleep::kPause; ++i) {
        CHECK(!look.is_worth());
    }
    CHECK(look.is_worth());
}

TEST(whoever_waits_hears_of_another_file_too) {
    Ends ends;
    auto [other, writer] = socket_pair(0);
    CHECK_EQUAL(send(writer.number(), "x", 1, 0), 1);
    ends.end.wait(other.number(), kForEver);
    CHECK(ends.receive());
    CHECK(ends.frames.empty());
}

TEST(what_is_not_urgent_goes_with_the_next_frame_or_when_it_is_much) {
    Ends ends;
    CHECK(ends.end.send_later(bytes_in("first")));
    CHECK(!ends.end.has_unsent());  // nobody has to watch the socket for it
    CHECK(ends.peer.read_some().empty());
    CHECK(ends.end.send(bytes_in("second")));
    CHECK_EQUAL(ends.peer.read_some(), pack("first") + pack("second"));
    CHECK(ends.end.send_later(bytes_in("third")));
    CHECK(ends.end.flush());
    CHECK_EQUAL(ends.peer.read_some(), pack("third"));
    const std::string much = body(8000, 1);
    CHECK(ends.end.send_later(bytes_in(much)));
    CHECK_EQUAL(ends.peer.read_some(), pack(much));
}

TEST(both_ends_see_that_it_is_over) {
    Ends ends;
    CHECK(ends.end.file() >= 0);
    auto waiting = std::async(std::launch::async, [&] { ends.end.wait(-1, kForEver); });
    auto reading = std::async(std::launch::async, [&] { return ends.peer.read_frame(); });
    ends.end.shut();
    waiting.get();
    CHECK(!reading.get());
    CHECK(!ends.receive());
    CHECK(!ends.end.send(bytes_in("x")));
    CHECK(!ends.peer.send(pack("x")));
    ends.end.shut();
    CHECK(ends.end.file() >= 0);
}
