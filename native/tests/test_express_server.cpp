#include "service/express_server.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "express_served.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// The mask of a thread of this process, by its name.
std::uint64_t blocked_signals_of(const std::string& name) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string comm;
        std::getline(std::ifstream(task.path() / "comm") >> std::ws, comm);
        std::ifstream status(task.path() / "status");
        for (std::string line; comm == name && std::getline(status, line);) {
            if (line.starts_with("SigBlk:")) {
                return std::stoull(line.substr(7), nullptr, 16);
            }
        }
    }
    fail(__FILE__, __LINE__, "there is no thread " + name);
}

}  // namespace

TEST(calls_are_answered_in_their_order) {
    ServedScene scene;
    Peer peer = scene.open();
    std::string calls;
    for (std::uint64_t number = 1; number <= 3000; ++number) {
        calls += mark(number);
    }
    CHECK(peer.send(calls));
    for (std::uint64_t number = 1; number <= 3000; ++number) {
        const Answer answer = next_answer(peer);
        CHECK_EQUAL(answer.op, std::uint64_t{express::kDone});
        CHECK_EQUAL(answer.number, number);
    }
    // And a call that comes in pieces.
    const std::string call = mark(7);
    for (const char byte : call) {
        CHECK(peer.send(std::string(1, byte)));
    }
    CHECK_EQUAL(next_answer(peer).number, 7u);
}

TEST(the_time_of_each_call_is_counted) {
    ServedScene scene;
    Peer peer = scene.open();
    CHECK(peer.send(scene.acquires(3)));
    for (int i = 0; i < 3; ++i) {
        next_answer(peer);
    }
    CHECK(peer.send(mark(4)));
    next_answer(peer);
    std::uint64_t acquires = 0;
    std::uint64_t others = 0;
    for (const CallTimes::Row& row : scene.server.times().rows()) {
        for (const auto& count : row.counts) {
            (row.op == express::kAcquire ? acquires : others) += count.load();
        }
        CHECK_EQUAL(row.sum_ns.load() != 0, row.op == express::kAcquire);
    }
    CHECK_EQUAL(acquires, 3u);
    CHECK_EQUAL(others, 0u);
    scene.end_session();
}

TEST(calls_expire_by_the_clock_of_the_machine) {
    ServedScene scene;
    Peer peer = scene.open();
    timespec now{};
    CHECK_EQUAL(clock_gettime(CLOCK_MONOTONIC, &now), 0);
    const std::uint64_t in_an_hour = static_cast<std::uint64_t>(now.tv_sec + 3600) * 1'000'000'000;
    for (const std::uint64_t expires_ns : {std::uint64_t{1}, in_an_hour, std::uint64_t{2}, ~std::uint64_t{0}}) {
        CHECK(peer.send(pack(make_frame({.op = express::kMark, .number = expires_ns, .expires_ns = expires_ns}, {}))));
    }
    CHECK_EQUAL(next_answer(peer).number, in_an_hour);
    CHECK_EQUAL(next_answer(peer).number, ~std::uint64_t{0});
}

TEST(answers_may_be_more_than_a_socket_holds) {
    ServedScene scene;
    Peer peer = scene.open();
    constexpr std::uint64_t kCalls = 400;
    auto sent = std::async(std::launch::async, [&] { return peer.send(scene.acquires(kCalls)); });
    std::vector<LeaseId> leases;
    std::size_t bytes = 0;
    for (std::uint64_t number = 1; number <= kCalls; ++number) {
        const Answer answer = next_answer(peer);
        CHECK(answer.is_hit());
        CHECK_EQUAL(answer.number, number);
        leases.push_back(answer.lease);
        bytes += answer.frame.size();
    }
    CHECK(sent.get());
    CHECK(bytes > 4'000'000);
    CHECK_EQUAL(scene.cache->stats().leases, kCalls);
    std::uint64_t one_way = 0;
    for (std::size_t at = 0; at < leases.size(); at += 16) {
        const std::vector<LeaseId> some(leases.begin() + static_cast<std::ptrdiff_t>(at),
                                        leases.begin() + static_cast<std::ptrdiff_t>(std::min(at + 16, leases.size())));
        CHECK(peer.send(pack(make_frame({.op = express::kRelease, .number = ++one_way}, {numbers(some)}))));
    }
    CHECK(peer.send(mark(kCalls + 1)));
    CHECK_EQUAL(next_answer(peer).number, kCalls + 1);  // and with that all before it is done
    scene.check_nothing_held();
}

TEST(a_process_that_goes_ends_its_channel_wherever_that_is) {
    ServedScene scene;
    const std::string call = scene.acquires(1, 2);
    for (const std::size_t cut : {std::size_t{0}, std::size_t{2}, std::size_t{4}, std::size_t{20}, call.size() - 1}) {
        Peer peer = scene.open();
        CHECK(peer.send(call + call.substr(0, cut)));
        const Answer answer = next_answer(peer);
        CHECK_EQUAL(shutdown(peer.file(), SHUT_WR), 0);
        CHECK(!peer.read_frame());
        CHECK(scene.cache->leases().release(scene.session, answer.lease));  // which it had
    }
    Peer peer = scene.open();
    CHECK(peer.send(call.substr(0, 9)));
    peer.close();
    scene.server.close();
    scene.check_nothing_held();
}

TEST(a_wrong_call_is_answered_and_ends_its_channel) {
    ServedScene scene;
    const std::string late = make_frame({.op = express::kMark, .number = 1, .session = kSession + 1}, {});
    const std::string malformed = make_frame({.op = express::kMark, .number = 0}, {});
    const std::string hole = make_frame({.op = express::kAbort, .number = 2}, {numbers({})});
    for (const std::string& wrong : {late, malformed, hole, std::string("nothing of ours"), std::string()}) {
        Peer peer = scene.open();
        CHECK(peer.send(mark(1) + pack(wrong) + mark(2)));
        CHECK_EQUAL(next_answer(peer).op, std::uint64_t{express::kDone});
        CHECK_EQUAL(next_answer(peer).op, std::uint64_t{express::kError});
        CHECK(!peer.read_frame());
    }
    CHECK_EQUAL(scene.server.count_refusals(0, express::kNoSession), 1u);
    CHECK_EQUAL(scene.server.count_refusals(0, express::kOutOfOrder), 1u);
    CHECK_EQUAL(scene.server.count_refusals(0, express::kMalformed), 3u);
    // A frame beyond the limit is not even read.
    Peer peer = scene.open();
    const auto size = static_cast<std::uint32_t>(scene.terms.frame_bytes + 1);
    CHECK(peer.send(mark(1) + std::string(reinterpret_cast<const char*>(&size), sizeof(size))));
    CHECK_EQUAL(next_answer(peer).op, std::uint64_t{express::kDone});
    CHECK(!peer.read_frame());
}

TEST(channels_beyond_the_limit_are_closed) {
    ServedScene scene(2);
    Peer first = scene.open();
    const std::uint64_t first_channel = scene.channel;
    Peer second = scene.open();
    CHECK(scene.channel != first_channel);
    for (int i = 0; i < 3; ++i) {
        auto [end, other] = socket_pair();
        CHECK_EQUAL(scene.server.open(std::move(end), borrow(scene.cache), scene.rights()), 0u);
        CHECK_EQUAL(end.number(), -1);
        CHECK(!Peer(std::move(other)).read_frame());
    }
    scene.server.end(12345);
    for (Peer* peer : {&first, &second}) {
        CHECK(peer->send(mark(1)));
        CHECK_EQUAL(next_answer(*peer).number, 1u);
    }
    // Ended, the number is never used again.
    const std::uint64_t last = scene.channel;
    scene.server.close();
    Peer third = scene.open();
    CHECK(scene.channel > last);
    CHECK(third.send(mark(1)));
    CHECK_EQUAL(next_answer(third).number, 1u);
}

TEST(an_ended_channel_ends_for_its_process_too_and_for_nobody_else) {
    ServedScene scene;
    Peer first = scene.open();
    Peer second = scene.open();
    const std::uint64_t channel = scene.channel;
    Peer third = scene.open();
    CHECK(second.send(mark(1)));
    CHECK_EQUAL(next_answer(second).number, 1u);
    scene.server.end(channel);
    CHECK(!second.read_frame());
    scene.server.end(channel);
    for (Peer* peer : {&first, &third}) {
        CHECK(peer->send(mark(1)));
        CHECK_EQUAL(next_answer(*peer).number, 1u);
    }
}

TEST(no_call_is_begun_on_an_ended_channel) {
    ServedScene scene;
    constexpr std::uint64_t kCalls = 3000;
    const std::vector<Ticket> tickets = [&] {
        std::vector<Ticket> found(kCalls);
        CHECK_EQUAL(value_of(scene.cache->reservations().reserve(scene.session, 0, scene.space(4), {}, found)), kCalls);
        return found;
    }();
    const std::vector<Ticket> told = scene.cache.reserve(scene.session, scene.space(4), chain(5, 1));
    scene.server.log().watch(true);
    std::string calls =
        pack(make_frame({.op = express::kPublish, .number = 1}, scene.publish_fields(4, 0, told, chain(5, 1))));
    for (std::uint64_t i = 0; i < kCalls; ++i) {
        calls += pack(make_frame({.op = express::kAbort, .number = 2 + i}, {numbers({tickets[i]})}));
    }
    Peer peer = scene.open();
    auto sent = std::async(std::launch::async, [&] { return peer.send(calls); });
    pollfd begun{.fd = scene.server.log().file(), .events = POLLIN, .revents = 0};
    CHECK_EQUAL(poll(&begun, 1, -1), 1);
    scene.server.end(scene.channel);
    const std::uint64_t left = scene.cache->stats().reserved;
    scene.server.close();
    CHECK(left - scene.cache->stats().reserved <= 1);  // the one that was being served
    sent.get();
}

TEST(leases_that_a_process_may_have_read_of_stay) {
    ServedScene scene;
    Peer peer = scene.open(kSmallBuffer, scene.acquires(40));
    std::vector<Answer> answers = {next_answer(peer)};
    // The server is sending the rest, of which the process has whatever it can read now.
    scene.server.end(scene.channel);
    scene.server.close();
    for (Answer& answer : last_answers(peer)) {
        answers.push_back(std::move(answer));
    }
    CHECK(answers.size() < 40);
    for (const Answer& answer : answers) {
        CHECK(answer.is_hit());
        CHECK(scene.cache->leases().release(scene.session, answer.lease));
    }
}

TEST(slots_that_a_process_may_write_to_stay) {
    ServedScene scene;
    std::string calls;
    for (std::uint64_t number = 1; number <= 60; ++number) {
        calls += pack(make_frame({.op = express::kCredits, .number = number}, scene.credits_fields(4, 128)));
    }
    Peer peer = scene.open(kSmallBuffer, calls);
    std::vector<Answer> answers = {next_answer(peer)};
    scene.server.close();
    for (Answer& answer : last_answers(peer)) {
        answers.push_back(std::move(answer));
    }
    CHECK(answers.size() < 60);
    for (const Answer& answer : answers) {
        CHECK_EQUAL(scene.cache->reservations().abort(scene.session, answer.tickets), 128u);
    }
}

TEST(what_no_process_can_read_of_is_given_back) {
    ServedScene scene;
    const std::string credits = make_frame({.op = express::kCredits, .number = 9}, scene.credits_fields(1, 5));
    for (const std::string& calls : {scene.acquires(3), pack(credits) + scene.acquires(3)}) {
        auto [end, other] = socket_pair();
        Peer peer(std::move(other));
        CHECK(peer.send(calls));
        CHECK_EQUAL(shutdown(peer.file(), SHUT_RD), 0);
        CHECK(scene.server.open(std::move(end), borrow(scene.cache), scene.rights()) != 0);
        pollfd over{.fd = peer.file(), .events = 0, .revents = 0};
        CHECK_EQUAL(poll(&over, 1, -1), 1);
        // The first answer finds it out, and nothing is begun behind it.
        CHECK_EQUAL(scene.cache->stats().hits, 1u);
        scene.check_nothing_held();
    }
}

// The socket takes what it can at once, and the process reads as fast as it can: there is room again and again.
TEST(nothing_is_sent_behind_an_answer_that_was_cut_off) {
    ServedScene scene;
    for (int round = 0; round < 50; ++round) {
        Peer peer = scene.open(kSmallBuffer, scene.acquires(40), O_NONBLOCK);
        std::string came;
        while (!peer.has_ended()) {
            came += peer.read_some();
        }
        std::uint64_t number = 0;
        for (const Answer& answer : read_whole_answers(came)) {
            CHECK_EQUAL(answer.number, ++number);
            CHECK(answer.is_hit());
            CHECK(scene.cache->leases().release(scene.session, answer.lease));
        }
        scene.end_session();
    }
}

TEST(a_process_that_does_not_read_holds_up_nobody) {
    ServedScene scene;
    std::vector<Peer> peers;
    for (int i = 0; i < 3; ++i) {
        peers.push_back(scene.open(kSmallBuffer, scene.acquires(60)));
        peers.push_back(scene.open());
    }
    CHECK(peers[5].send(mark(3)));
    CHECK_EQUAL(next_answer(peers[5]).number, 3u);
    peers[0].close();
    scene.server.end(scene.channel - 3);
    scene.end_session();  // with two that are sending and two that are waiting
    CHECK(!peers[1].read_frame() && !peers[5].read_frame());
}

TEST(whoever_holds_more_than_its_share_of_long_messages_has_its_channel_ended) {
    constexpr std::size_t kFrame = 1 << 20;
    ServedScene scene(16, 4 * kFrame);
    const std::string begun = pack(std::string(kFrame, 'x')).substr(0, kFrame);
    const std::string wrong = pack(std::string(300'000, 'x'));  // which is answered, once it is there
    std::vector<Peer> peers;
    for (int i = 0; i < 3; ++i) {
        peers.push_back(scene.open());
        CHECK(peers.back().send(begun));
    }
    Peer next = scene.open();
    next.send(wrong);
    CHECK(!next.read_frame());
    // Others have a share of their own.
    auto [end, theirs] = socket_pair();
    ExpressRights rights = scene.rights();
    rights.user = "another";
    CHECK(scene.server.open(std::move(end), borrow(scene.cache), rights) != 0);
    Peer other(std::move(theirs));
    CHECK(other.send(wrong));
    CHECK(other.read_frame().has_value());
    // The share of a connection that has ended is free for the next one.
    peers[0].close();
    for (bool is_answered = false; !is_answered;) {
        next = scene.open();
        next.send(wrong);
        is_answered = next.read_frame().has_value();
    }
    scene.end_session();
}

TEST(an_answer_that_nobody_reads_is_held_within_the_share) {
    ServedScene scene(16, 512 << 10);
    scene.put(0, 9, 0, 256);
    const std::string call =
        pack(make_frame({.op = express::kAcquireEntries, .number = 1},
                        scene.entries_fields(0, chain(9, 256), std::vector<std::uint64_t>(64, 1))));
    std::vector<Peer> peers;
    std::vector<std::string> heads;
    for (int i = 0; i < 8; ++i) {
        peers.push_back(scene.open(kSmallBuffer, call));
        heads.push_back(peers.back().read(4));  // then it waits until the rest is read
    }
    const auto answered = std::ranges::count_if(heads, [](const std::string& head) { return head.size() == 4; });
    CHECK(answered >= 1);
    CHECK(answered <= 2);  // more than 128 KiB each
    CHECK_EQUAL(heads.front().size(), 4u);
    scene.end_session();
}

TEST(a_server_that_drains_serves_what_ends) {
    ServedScene scene;
    Peer peer = scene.open();
    CHECK(peer.send(scene.acquires(1, 2)));
    const Answer held = next_answer(peer);
    scene.server.start_drain();
    CHECK(peer.send(scene.acquires(1, 2)));
    CHECK_EQUAL(next_answer(peer).code, std::uint64_t{express::kDraining});
    CHECK(peer.send(pack(make_frame({.op = express::kRelease, .number = 1}, {numbers({held.lease})})) + mark(2)));
    CHECK_EQUAL(next_answer(peer).number, 2u);
    scene.check_nothing_held();
}

TEST(signals_are_for_other_threads) {
    ServedScene scene;
    sigset_t before;
    sigset_t after;
    pthread_sigmask(SIG_SETMASK, nullptr, &before);
    const Peer peer = scene.open();
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    const std::uint64_t blocked = blocked_signals_of("kvo-express");
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGALRM, SIGUSR1, SIGUSR2, SIGPIPE, SIGRTMIN}) {
        CHECK(blocked >> (signal - 1) & 1);
        CHECK_EQUAL(sigismember(&before, signal), sigismember(&after, signal));
        CHECK_EQUAL(sigismember(&after, signal), 0);
    }
}

TEST(a_channel_that_has_ended_lets_go_of_the_cache_at_a_tick) {
    ServedScene scene;
    const std::shared_ptr<CacheCore> core(scene.cache.operator->(), [](CacheCore*) {});
    auto [end, other] = socket_pair();
    Peer peer(std::move(other));
    CHECK(scene.server.open(std::move(end), core, scene.rights()) != 0);
    peer.close();
    while (core.use_count() > 1) {
        scene.server.tick();
        std::this_thread::yield();
    }
}

TEST(a_channel_keeps_the_cache_until_the_server_is_closed) {
    ServedScene scene;
    const std::shared_ptr<CacheCore> core(scene.cache.operator->(), [](CacheCore*) {});
    auto [end, other] = socket_pair();
    Peer peer(std::move(other));
    CHECK(scene.server.open(std::move(end), core, scene.rights()) != 0);
    CHECK(core.use_count() > 1);
    CHECK(peer.send(mark(1)));
    CHECK_EQUAL(next_answer(peer).number, 1u);
    scene.server.close();
    CHECK_EQUAL(core.use_count(), 1);
    CHECK(!peer.read_frame());
    scene.server.close();
}
