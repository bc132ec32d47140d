// A server of express channels, a cache of all kinds of groups, and processes that call.
#pragma once

#include <fcntl.h>

#include <string>
#include <utility>
#include <vector>

#include "express_fixture.hpp"
#include "express_peer.hpp"
#include "service/express_server.hpp"

namespace kvo::test {

constexpr int kSmallBuffer = 4096;
constexpr std::uint64_t kMessageBytes = 64UL << 20;

struct ServedScene : ExpressScene {
    explicit ServedScene(std::size_t channels = 16, std::uint64_t message_bytes = kMessageBytes)
        : server(terms, channels, 100, message_bytes) {
        put_all(1, 256);
    }

    // `queued`: what has been sent before.
    Peer open(int buffer_bytes = 0, const std::string& queued = {}, int flags = 0) {
        auto [end, other] = socket_pair(buffer_bytes);
        Peer peer(std::move(other));
        CHECK(peer.send(queued));
        CHECK_EQUAL(fcntl(end.number(), F_SETFL, flags), 0);
        channel = server.open(std::move(end), borrow(cache), rights());
        CHECK(channel != 0);
        return peer;
    }
    // All channels end, and the session with what it held.
    void end_session() {
        server.close();
        CHECK(cache->sessions().quarantine(session));
        CHECK_EQUAL(cache->reclaim_ended(), 1u);
        check_nothing_held();
        session = cache.session();
    }
    // Packs acquires whose answers have about 10 KB each.
    std::string acquires(std::size_t count, std::size_t shard_count = 64) {
        std::string bytes;
        for (std::size_t i = 0; i < count; ++i) {
            const auto fields = acquire_fields(1, 16, std::vector<std::uint64_t>(shard_count, 1));
            bytes += pack(make_frame({.op = express::kAcquire, .number = i + 1}, fields));
        }
        return bytes;
    }

    ExpressServer server;
    std::uint64_t channel = 0;
};

inline std::string mark(std::uint64_t number) { return pack(make_frame({.op = express::kMark, .number = number}, {})); }

inline Answer next_answer(Peer& peer) {
    const auto frame = peer.read_frame();
    CHECK(frame.has_value());
    return read_answer(bytes_in(*frame));
}

// The rest of what a channel that has ended answered.
inline std::vector<Answer> last_answers(Peer& peer) {
    std::vector<Answer> answers;
    while (const auto frame = peer.read_frame()) {
        answers.push_back(read_answer(bytes_in(*frame)));
    }
    return answers;
}

}  // namespace kvo::test
