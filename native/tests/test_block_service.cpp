#include <random>

#include "express_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

bool is_one_way(std::uint64_t op) { return op >= 32 && op < 48; }

// Gives back what an answer brought. Whatever was held beyond that is seen at the end.
void return_all(ExpressScene& scene, const std::vector<Answer>& answers) {
    for (const Answer& answer : answers) {
        scene.cache->leases().release(scene.session, answer.lease);
        scene.cache->reservations().abort(scene.session, answer.tickets);
    }
}

// One frame on a channel of its own; afterwards nothing is held. The answers.
std::vector<Answer> serve_alone(ExpressScene& scene, const std::string& frame) {
    scene.renew();
    const std::vector<Answer> answers = scene.serve(frame).first;
    CHECK(answers.size() <= 1);
    return_all(scene, answers);
    return answers;
}

}  // namespace

TEST(a_mark_is_done) {
    ExpressScene scene;
    const Answer answer = scene.ask(express::kMark, {});
    CHECK_EQUAL(answer.op, std::uint64_t{express::kDone});
}

TEST(answers_lie_behind_each_other_with_their_numbers) {
    ExpressScene scene;
    scene.put_all(1, 64);
    std::string out;
    for (const std::uint64_t number : {7ull, 7ull, 1ull, 1ull << 63, ~0ull}) {
        const std::string frame = make_frame({.op = express::kMark, .number = number}, {});
        CHECK(scene.service->serve(bytes_in(frame), kNow, out));
        const std::string acquire = make_frame({.op = express::kAcquire, .number = number}, scene.acquire_fields(1, 4));
        CHECK(scene.service->serve(bytes_in(acquire), kNow, out));
    }
    const std::vector<Answer> answers = read_answers(out);
    CHECK_EQUAL(answers.size(), 10u);
    CHECK_EQUAL(answers[4].number, 1u);
    CHECK_EQUAL(answers[9].number, ~0ull);
    CHECK(answers[9].is_hit());
}

TEST(another_session_ends_the_channel) {
    for (const std::uint64_t session : {std::uint64_t{0}, kSession + 1, kSession & 0xffffffff}) {
        ExpressScene scene;
        scene.put_all(1, 64);
        const Answer held = scene.ask(express::kAcquire, scene.acquire_fields(1, 4));
        for (const auto& [op, fields] : scene.good_calls()) {
            const auto [answers, goes_on] =
                scene.serve(make_frame({.op = op, .number = 1, .session = session}, fields));
            CHECK(!goes_on);
            CHECK_EQUAL(answers.size(), 1u);
            CHECK_EQUAL(answers[0].code, std::uint64_t{express::kNoSession});
            CHECK_EQUAL(answers[0].about_op, op);
        }
        CHECK_EQUAL(scene.cache->stats().leases, 1u);
        CHECK(scene.cache->leases().release(scene.session, held.lease));
        scene.check_nothing_held();
    }
}

TEST(one_way_numbers_have_no_holes) {
    for (const std::uint64_t wrong : {0ull, 1ull, 2ull, 4ull, 1ull << 32 | 3, ~0ull}) {
        for (const std::uint64_t op : {std::uint64_t{express::kRelease}, std::uint64_t{47}}) {
            ExpressScene scene;
            scene.tell(express::kAbort, {numbers({})});
            CHECK_EQUAL(scene.ask(express::kMark, {}).op, std::uint64_t{express::kDone});
            scene.tell(express::kRelease, {numbers({})});
            const Answer held = scene.ask(express::kCredits, scene.credits_fields(0, 1));
            const auto [answers, goes_on] =
                scene.serve(make_frame({.op = op, .number = wrong}, {numbers({held.tickets[0]})}));
            CHECK(!goes_on);
            CHECK_EQUAL(answers.size(), 1u);
            CHECK_EQUAL(answers[0].code, std::uint64_t{wrong == 0 ? express::kMalformed : express::kOutOfOrder});
            CHECK_EQUAL(answers[0].number, wrong);
            CHECK_EQUAL(scene.cache->stats().reserved, 1u);
        }
    }
}

TEST(what_is_refused_of_one_way_messages_is_counted) {
    ExpressScene scene;
    CHECK_EQUAL(scene.refuse(express::kAbort, {whole(3)}), std::uint64_t{express::kMalformed});
    CHECK_EQUAL(scene.refuse(express::kInvalidate, {whole(scene.name_space), whole(9), blob({})}),
                std::uint64_t{express::kNotFound});
    CHECK_EQUAL(scene.refuse(40, {}), std::uint64_t{express::kUnknownOperation});
    scene.tell(express::kAbort, {numbers({})});
}

TEST(requests_are_numbered_from_1) {
    ExpressScene scene;
    scene.put_all(1, 64);
    for (const auto& [op, fields] : scene.good_calls()) {
        const auto [answers, goes_on] = scene.serve(make_frame({.op = op, .number = 0}, fields));
        CHECK(!goes_on);
        CHECK_EQUAL(answers.size(), 1u);
        CHECK_EQUAL(answers[0].code, std::uint64_t{express::kMalformed});
        CHECK_EQUAL(answers[0].number, 0u);
    }
    scene.check_nothing_held();
}

TEST(operations_of_other_channels_are_unknown) {
    ExpressScene scene;
    for (const std::uint64_t op : {0u, 1u, 3u, 7u, 10u, 12u, 31u, 48u, 64u, 68u, 65535u}) {
        CHECK_EQUAL(scene.refuse(op, {}), std::uint64_t{express::kUnknownOperation});
    }
    for (const std::uint64_t op : {65536ull, 1ull << 32 | express::kMark, ~0ull}) {
        const auto [answers, goes_on] = scene.serve(make_frame({.op = op, .number = 1}, {}));
        CHECK(!goes_on);
        CHECK_EQUAL(answers.at(0).code, std::uint64_t{express::kMalformed});
    }
}

TEST(what_comes_too_late_is_dropped) {
    ExpressScene scene;
    scene.put_all(1, 64);
    for (const std::uint64_t expires_ns : {std::uint64_t{1}, kNow - 1, kNow, kNow + 1, ~std::uint64_t{0}}) {
        scene.renew();
        for (const auto& [op, fields] : scene.good_calls()) {
            const std::uint64_t number = is_one_way(op) ? ++scene.last_one_way : ++scene.last_request;
            const auto [answers, goes_on] =
                scene.serve(make_frame({.op = op, .number = number, .expires_ns = expires_ns}, fields));
            CHECK(goes_on);
            CHECK_EQUAL(answers.size(), expires_ns > kNow && !is_one_way(op) ? 1u : 0u);
            return_all(scene, answers);
        }
        scene.check_nothing_held();
    }
    // Dropped, and counted.
    const Answer held = scene.ask(express::kCredits, scene.credits_fields(0, 1));
    scene.renew();
    const std::string late =
        make_frame({.op = express::kAbort, .number = 1, .expires_ns = kNow}, {numbers({held.tickets[0]})});
    CHECK(scene.serve(late).second);
    CHECK_EQUAL(scene.cache->stats().reserved, 1u);
    CHECK(!scene.serve(late).second);
}

TEST(a_server_that_ends_takes_nothing_new) {
    ExpressScene scene;
    scene.put_all(1, 64);
    const Answer lease = scene.ask(express::kAcquire, scene.acquire_fields(1, 4));
    const Answer credits = scene.ask(express::kCredits, scene.credits_fields(1, 0, chain(2, 2)));
    scene.cache.write(scene.session, scene.space(1), chain(2, 2), credits.tickets);
    scene.is_draining.store(true);
    constexpr std::uint64_t kDraining = express::kDraining;
    CHECK_EQUAL(scene.refuse(express::kAcquire, scene.acquire_fields(1, 4)), kDraining);
    CHECK_EQUAL(scene.refuse(express::kAcquireEntries, scene.entries_fields(0, chain(1, 1))), kDraining);
    CHECK_EQUAL(scene.refuse(express::kCredits, scene.credits_fields(0, 1)), kDraining);
    CHECK_EQUAL(scene.ask(express::kMark, {}).op, std::uint64_t{express::kDone});
    const Hashes first = chain(2, 1);
    scene.tell(express::kPublish, scene.publish_fields(1, 0, {credits.tickets[0]}, first));
    CHECK_EQUAL(scene.cache.count_readable(scene.space(1), first), 1u);
    scene.tell(express::kInvalidate, {whole(scene.name_space), whole(1), blob(first)});
    CHECK_EQUAL(scene.cache.count_readable(scene.space(1), first), 0u);
    scene.tell(express::kAbort, {numbers({credits.tickets[1]})});
    scene.tell(express::kRelease, {numbers({lease.lease})});
    scene.check_nothing_held();
}

TEST(what_was_not_sent_is_given_back) {
    ExpressScene scene;
    scene.put_all(1, 64);
    const auto take = [&] {
        scene.ask(express::kAcquire, scene.acquire_fields(1, 4, {0, 1}));
        scene.ask(express::kAcquireEntries, scene.entries_fields(1, chain(1, 2)));
        scene.ask(express::kCredits, scene.credits_fields(0, 2));
        scene.ask(express::kCredits, scene.credits_fields(0, 0, chain(1, 5)));
        CHECK_EQUAL(scene.cache->stats().leases, 2u);
        CHECK_EQUAL(scene.cache->stats().reserved, 3u);
    };
    take();
    scene.service->settle(false);
    scene.check_nothing_held();
    scene.service->settle(false);
    take();
    scene.service->settle(true);
    scene.service->settle(false);  // that is of what came since
    CHECK_EQUAL(scene.cache->stats().leases, 2u);
    CHECK_EQUAL(scene.cache->stats().reserved, 3u);
}

TEST(a_namespace_that_is_gone_is_a_fault_of_the_server) {
    ExpressScene scene;
    scene.name_space = 999;
    scene.renew();
    CHECK_EQUAL(scene.refuse(express::kAcquire, scene.acquire_fields(1, 4)), std::uint64_t{express::kInternal});
    CHECK_EQUAL(scene.refuse(express::kAcquireEntries, scene.entries_fields(0, chain(1, 1))),
                std::uint64_t{express::kNotFound});
}

TEST(a_frame_that_is_cut_off_is_malformed_wherever_that_is) {
    ExpressScene scene;
    scene.put_all(1, 256);
    for (const auto& [op, fields] : scene.good_calls()) {
        const std::string good = make_frame({.op = op, .number = 1}, fields);
        for (std::size_t size = 0; size < good.size(); ++size) {
            scene.renew();
            const auto [answers, goes_on] = scene.serve(good.substr(0, size));
            CHECK_EQUAL(answers.size(), 1u);
            CHECK_EQUAL(answers[0].code, std::uint64_t{express::kMalformed});
            CHECK_EQUAL(goes_on, answers[0].number == 1);
            CHECK_EQUAL(answers[0].about_op, size < 2 ? 0 : op);
            CHECK_EQUAL(answers[0].number, size < 3 ? 0u : 1u);
        }
        scene.check_nothing_held();
        // And if something hangs on behind it.
        scene.renew();
        const auto [answers, goes_on] = scene.serve(good + '\0');
        CHECK(goes_on);
        CHECK_EQUAL(answers.at(0).code, std::uint64_t{express::kMalformed});
        scene.check_nothing_held();
    }
}

TEST(frames_of_another_kind_are_malformed) {
    ExpressScene scene;
    scene.put_all(1, 64);
    for (const std::string& frame :
         {std::string(), std::string("\x90"), std::string("\x93\x0b\x01\x01"), std::string("\x84\x0b\x01\x01\x00"),
          std::string("\xc0"), std::string("\x0b"), std::string("\xdd\x00\x00\x01\x00\x0b\x01\x01\x00", 9),
          std::string("\xdc\xff\xff"), std::string("\xc4\x01x"), std::string("\xd9\x01x"), std::string(1000, '\xff')}) {
        const auto [answers, goes_on] = scene.serve(frame);
        CHECK(!goes_on);
        CHECK_EQUAL(answers.at(0).code, std::uint64_t{express::kMalformed});
        CHECK_EQUAL(answers.at(0).number, 0u);
    }
    // Every field as every other kind of value.
    for (const auto& [op, fields] : scene.good_calls()) {
        for (std::size_t at = 0; at < fields.size(); ++at) {
            for (const std::string& value : {std::string("\xc0"), std::string("\xc3"), std::string("\xa1x"),
                                             std::string("\xff"), std::string("\x80"), std::string("\xc4\x01x"),
                                             std::string("\x91\xc0"), std::string("\xcb\0\0\0\0\0\0\0\0", 9)}) {
                FieldList wrong = fields;
                wrong[at] = raw(value);
                const auto answers = serve_alone(scene, make_frame({.op = op, .number = 1}, wrong));
                // This version does not read the reason of an invalidation.
                const bool is_read = op != express::kInvalidate || at < 3;
                CHECK_EQUAL(answers.size(), is_read || value == "\x80" ? 1u : 0u);
                CHECK(answers.empty() || answers[0].code == express::kMalformed);
            }
        }
    }
    scene.check_nothing_held();
}

TEST(fields_of_a_later_version_change_nothing) {
    ExpressScene scene;
    scene.put_all(1, 256);
    const std::vector<std::string> later = {std::string("\xc0"),           std::string("\xcd\x01\x02"),
                                            std::string("\xa3xyz"),        std::string("\x92\x01\x91\xc2"),
                                            std::string("\xd0\x80"),       std::string("\xc4\x03xyz"),
                                            std::string("\xca\0\0\0\0", 5)};
    for (const auto& [op, fields] : scene.good_calls()) {
        const auto plain = serve_alone(scene, make_frame({.op = op, .number = 1}, fields));
        FieldList more = fields;
        for (const std::string& value : later) {
            more.push_back(raw(value));
            const auto answers = serve_alone(scene, make_frame({.op = op, .number = 1}, more));
            CHECK_EQUAL(answers.size(), plain.size());
            CHECK(answers.empty() || (answers[0].op == plain[0].op && answers[0].boundary == plain[0].boundary &&
                                      answers[0].tickets.size() == plain[0].tickets.size()));
        }
        for (const std::string& value : {std::string("\x80"), std::string("\xc1"), std::string("\x91\x91\x91\x91\x01"),
                                         std::string("\xd4\0\0", 3)}) {
            FieldList wrong = more;
            wrong.push_back(raw(value));
            CHECK_EQUAL(serve_alone(scene, make_frame({.op = op, .number = 1}, wrong)).at(0).code,
                        std::uint64_t{express::kMalformed});
        }
    }
    scene.check_nothing_held();
}

// Good frames with a few bytes changed, left out, put in, or of another frame.
TEST(whatever_comes_nothing_stays_held_that_was_not_answered) {
    ExpressScene scene;
    scene.put_all(1, 256);
    std::vector<std::string> good;
    for (const auto& [op, fields] : scene.good_calls()) {
        good.push_back(make_frame({.op = op, .number = 1}, fields));
    }
    std::mt19937_64 random(1);
    std::size_t served = 0;
    for (int round = 0; round < 20'000; ++round) {
        std::string frame = good[random() % good.size()];
        for (std::uint64_t changes = 1 + random() % 3; changes > 0 && !frame.empty(); --changes) {
            // Most of what decides is in front.
            const std::size_t at =
                random() % (random() % 2 == 0 ? std::min<std::size_t>(frame.size(), 24) : frame.size());
            const std::string& other = good[random() % good.size()];
            switch (random() % 5) {
                case 0:
                    frame[at] = static_cast<char>(random());
                    break;
                case 1:
                    frame[at] = static_cast<char>(frame[at] ^ 1 << random() % 8);
                    break;
                case 2:
                    frame.erase(at, 1 + random() % 9);
                    break;
                case 3:
                    frame.insert(at, 1 + random() % 9, static_cast<char>(random()));
                    break;
                default:
                    frame.replace(at, 8, other.substr(random() % other.size(), random() % 40));
            }
        }
        const auto answers = serve_alone(scene, frame);
        served += answers.empty() || answers[0].op != express::kError;
        if (round % 1000 == 999) {
            scene.check_nothing_held();
        }
    }
    CHECK(served > 500);
    scene.check_nothing_held();
}
