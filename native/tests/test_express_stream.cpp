#include "service/express_stream.hpp"

#include <algorithm>
#include <random>
#include <string>

#include "check.hpp"

using namespace kvo;

namespace {

constexpr std::size_t kFirstRoom = 64 << 10;

std::string body(std::size_t size, unsigned seed) {
    std::string bytes(size, '\0');
    for (std::size_t i = 0; i < size; ++i) {
        bytes[i] = static_cast<char>(i * 31 + seed + (i >> 8));
    }
    return bytes;
}

std::string pack(const std::string& frame) {
    const auto size = static_cast<std::uint32_t>(frame.size());
    return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + frame;
}

// A stream and what came out of it.
struct Feed {
    explicit Feed(std::size_t frame_bytes) : stream(frame_bytes) {}

    // Puts as many bytes at a time as there is room for. False: the stream has ended.
    bool put(std::string_view bytes) {
        while (!bytes.empty()) {
            const std::span<std::uint8_t> room = stream.room();
            CHECK(!room.empty());
            const std::size_t count = std::min(room.size(), bytes.size());
            std::memcpy(room.data(), bytes.data(), count);
            stream.add(count);
            bytes.remove_prefix(count);
            if (!take()) {
                return false;
            }
        }
        return true;
    }
    bool take() {
        return stream.take_frames([&](std::span<const std::uint8_t> frame) {
            frames.emplace_back(frame.begin(), frame.end());
            return frames.size() != stop_at;
        });
    }

    ExpressStream stream;
    std::vector<std::string> frames;
    std::size_t stop_at = 0;  // frames; 0: never
};

}  // namespace

TEST(frames_come_whole_wherever_they_are_cut) {
    const std::vector<std::string> sent = {body(5, 1), "", body(1, 2), body(40, 3), ""};
    std::string bytes;
    for (const std::string& frame : sent) {
        bytes += pack(frame);
    }
    for (std::size_t first = 0; first <= bytes.size(); ++first) {
        for (std::size_t second = first; second <= bytes.size(); ++second) {
            Feed feed(40);
            CHECK(feed.put(std::string_view(bytes).substr(0, first)));
            CHECK(feed.put(std::string_view(bytes).substr(first, second - first)));
            CHECK(feed.put(std::string_view(bytes).substr(second)));
            CHECK(feed.frames == sent);
        }
    }
    Feed feed(40);
    for (const char byte : bytes) {
        CHECK(feed.put(std::string_view(&byte, 1)));
    }
    CHECK(feed.frames == sent);
}

TEST(many_frames_of_all_sizes_come_in_their_order) {
    std::mt19937_64 random(3);
    std::vector<std::string> sent;
    std::string bytes;
    for (unsigned i = 0; i < 300; ++i) {
        sent.push_back(body(random() % (i % 10 == 0 ? 300'000 : 3000), i));
        bytes += pack(sent.back());
    }
    Feed feed(300'000);
    for (std::size_t at = 0; at < bytes.size();) {
        const std::size_t count = std::min<std::size_t>(bytes.size() - at, 1 + random() % 200'000);
        CHECK(feed.put(std::string_view(bytes).substr(at, count)));
        at += count;
    }
    CHECK(feed.frames == sent);
}

TEST(a_frame_that_is_too_large_ends_it_before_it_comes) {
    for (const std::size_t more : {std::size_t{1}, std::size_t{1000}, std::size_t{UINT32_MAX - 100}}) {
        Feed feed(100);
        const auto size = static_cast<std::uint32_t>(100 + more);
        CHECK(feed.put(pack(body(100, 1))));
        CHECK_EQUAL(feed.put(std::string(reinterpret_cast<const char*>(&size), sizeof(size))), false);
        CHECK_EQUAL(feed.frames.size(), 1u);
    }
}

TEST(whoever_takes_frames_may_stop) {
    Feed feed(100);
    feed.stop_at = 2;
    CHECK(!feed.put(pack(body(1, 1)) + pack(body(2, 2)) + pack(body(3, 3))));
    CHECK_EQUAL(feed.frames.size(), 2u);
}

TEST(room_for_one_large_frame_is_not_kept) {
    constexpr std::size_t kLarge = 3 << 20;
    Feed feed(kLarge);
    CHECK_EQUAL(feed.stream.room().size(), kFirstRoom);
    CHECK(feed.put(pack(body(100'000, 1))));
    CHECK(feed.stream.room().size() > 100'000);  // for the next of this kind
    CHECK(feed.put(pack(body(kLarge, 1))));
    CHECK_EQUAL(feed.stream.room().size(), kFirstRoom);
    CHECK(feed.put(pack(body(7, 1))));
    CHECK_EQUAL(feed.frames.size(), 3u);
    CHECK(feed.frames[1] == body(kLarge, 1));

    // A frame that has begun to come stays.
    CHECK(feed.put((pack(body(kLarge, 2)) + pack(body(9, 3))).substr(0, kLarge + 7)));
    CHECK(feed.put(pack(body(9, 3)).substr(3)));
    CHECK_EQUAL(feed.frames.size(), 5u);
    CHECK(feed.frames[4] == body(9, 3));
}

TEST(room_stays_near_the_largest_frame) {
    Feed feed(1 << 20);
    std::size_t most = 0;
    const std::string bytes = pack(body(1 << 20, 1));
    for (int i = 0; i < 10; ++i) {
        CHECK(feed.put(std::string_view(bytes).substr(0, 5)));
        CHECK(feed.put(std::string_view(bytes).substr(5)));
        most = std::max(most, feed.stream.room().size());
    }
    CHECK(most <= bytes.size() + kFirstRoom);
    CHECK(feed.stream.extra_bytes() + kFirstRoom >= most);
    CHECK_EQUAL(feed.frames.size(), 10u);
}
