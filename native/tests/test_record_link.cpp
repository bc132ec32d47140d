#include "link/record_link.hpp"

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "codec_records.hpp"

using namespace kvo;
using namespace std::chrono_literals;

namespace {

using Bytes = std::vector<std::uint8_t>;

LinkKeys keys_of(std::uint8_t send, std::uint8_t receive) {
    LinkKeys keys;
    keys.send.fill(send);
    keys.receive.fill(receive);
    return keys;
}

RecordLink::Instant soon() { return RecordLink::Clock::now() + 60s; }

struct Ends {
    FileDescriptor one, other;
};

Ends make_ends() {
    std::array<int, 2> ends{};
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

std::unique_ptr<RecordLink> make_link(FileDescriptor end, const std::optional<LinkKeys>& keys) {
    Result<RecordLink> made = RecordLink::make(std::move(end), keys);
    CHECK(made.ok());
    return std::make_unique<RecordLink>(std::move(made.value()));
}

struct Pair {
    std::unique_ptr<RecordLink> one, other;
};

Pair make_pair_of(bool is_sealed) {
    Ends ends = make_ends();
    std::optional<LinkKeys> keys, mirrored;
    if (is_sealed) {
        keys = keys_of(1, 2);
        mirrored = keys_of(2, 1);
    }
    return {make_link(std::move(ends.one), keys), make_link(std::move(ends.other), mirrored)};
}

// Records side by side, each with bytes of its own.
struct Slots {
    Slots(std::size_t count, std::size_t size, bool is_filled) : bytes(count * size), record_bytes(size) {
        for (std::size_t at = 0; is_filled && at < bytes.size(); ++at) {
            bytes[at] = static_cast<std::uint8_t>(at * 31 + at / 253);
        }
        // The last comes first: nothing relies on their order in memory.
        for (std::size_t record = count; record-- > 0;) {
            addresses.push_back(reinterpret_cast<std::uint64_t>(bytes.data() + record * size));
        }
    }
    LinkRecords records() const { return {addresses, record_bytes}; }

    Bytes bytes;
    std::size_t record_bytes;
    std::vector<std::uint64_t> addresses;
};

const Bytes kHead = {'h', 'e', 'a', 'd'};

void check_moves(bool is_sealed, std::size_t count, std::size_t size) {
    Pair pair = make_pair_of(is_sealed);
    const Slots source(count, size, true);
    Slots target(count, size, false);
    std::thread sender([&] { CHECK(pair.one->send(kHead, source.records(), soon()).ok()); });
    Bytes head(kHead.size());
    CHECK(pair.other->receive(head, soon()).ok());
    std::vector<RunDigest> digests(count);
    CHECK(pair.other->receive_records(target.records(), digests, soon()).ok());
    sender.join();
    CHECK(head == kHead);
    CHECK(target.bytes == source.bytes);
    for (std::size_t at = 0; at < count; ++at) {
        const std::span record(reinterpret_cast<const std::uint8_t*>(source.addresses[at]), size);
        CHECK(digests[at] == digest_run(record, 0));
    }
}

}  // namespace

TEST(records_go_from_slot_to_slot) {
    for (const bool is_sealed : {false, true}) {
        check_moves(is_sealed, 1, 1);
        check_moves(is_sealed, 3, 1000);
        check_moves(is_sealed, 200, 4096);     // more than the system takes at once
        check_moves(is_sealed, 2, 1'500'000);  // more than a socket holds, and no whole number of pieces
        check_moves(is_sealed, 0, 4096);
    }
}

TEST(what_one_call_sends_may_be_read_by_many) {
    for (const bool is_sealed : {false, true}) {
        Pair pair = make_pair_of(is_sealed);
        CHECK(pair.one->send(Bytes{1, 2, 3, 4, 5}, {}, soon()).ok());
        CHECK(pair.one->send(Bytes{6}, {}, soon()).ok());
        for (std::uint8_t wanted = 1; wanted <= 6; ++wanted) {
            Bytes byte(1);
            CHECK(pair.other->receive(byte, soon()).ok());
            CHECK_EQUAL(byte[0], wanted);
        }
    }
}

TEST(both_ways_at_once) {
    for (const bool is_sealed : {false, true}) {
        Pair pair = make_pair_of(is_sealed);
        const Bytes text(300'000, 'x');
        Bytes here(text.size()), there(text.size());
        std::thread other([&] {
            CHECK(pair.other->receive(there, soon()).ok());
            CHECK(pair.other->send(text, {}, soon()).ok());
        });
        CHECK(pair.one->send(text, {}, soon()).ok());
        CHECK(pair.one->receive(here, soon()).ok());
        other.join();
        CHECK(here == text && there == text);
    }
}

TEST(a_sealed_link_shows_nothing_of_what_it_carries) {
    Ends ends = make_ends();
    const auto link = make_link(std::move(ends.one), keys_of(1, 2));
    const Bytes text(64, 'k');
    CHECK(link->send(text, {}, soon()).ok());
    Bytes seen(4 + text.size() + kSealTagBytes);
    CHECK_EQUAL(recv(ends.other.number(), seen.data(), seen.size(), MSG_WAITALL), static_cast<ssize_t>(seen.size()));
    CHECK_EQUAL(seen[0], 64);
    CHECK(std::string(seen.begin(), seen.end()).find("kkkk") == std::string::npos);
}

TEST(what_was_changed_on_the_way_is_refused) {
    Ends ends = make_ends(), behind = make_ends();
    const auto sender = make_link(std::move(ends.one), keys_of(1, 2));
    const auto receiver = make_link(std::move(behind.other), keys_of(2, 1));
    CHECK(sender->send(Bytes(100, 'a'), {}, soon()).ok());
    Bytes passed(4 + 100 + kSealTagBytes);
    CHECK_EQUAL(recv(ends.other.number(), passed.data(), passed.size(), MSG_WAITALL),
                static_cast<ssize_t>(passed.size()));
    passed[40] ^= 4;
    CHECK_EQUAL(send(behind.one.number(), passed.data(), passed.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(passed.size()));
    Bytes out(100);
    const Status status = receiver->receive(out, soon());
    CHECK(status.code() == Code::failed);
}

TEST(other_keys_open_nothing) {
    Ends ends = make_ends();
    const auto sender = make_link(std::move(ends.one), keys_of(1, 2));
    const auto receiver = make_link(std::move(ends.other), keys_of(2, 3));
    CHECK(sender->send(kHead, {}, soon()).ok());
    Bytes out(kHead.size());
    CHECK(receiver->receive(out, soon()).code() == Code::failed);
}

TEST(a_piece_longer_than_any_is_refused_unread) {
    Ends ends = make_ends();
    const auto receiver = make_link(std::move(ends.one), keys_of(2, 1));
    const std::array<std::uint8_t, 4> length = {0xff, 0xff, 0xff, 0x7f};
    CHECK_EQUAL(send(ends.other.number(), length.data(), length.size(), MSG_NOSIGNAL), 4);
    Bytes out(1);
    CHECK(receiver->receive(out, soon()).code() == Code::failed);
}

TEST(whoever_hangs_up_ends_the_wait) {
    for (const bool is_sealed : {false, true}) {
        Pair pair = make_pair_of(is_sealed);
        CHECK(pair.one->send(Bytes{1, 2}, {}, soon()).ok());
        pair.one.reset();
        Bytes out(3);
        CHECK(pair.other->receive(out, soon()).code() == Code::failed);
        CHECK(pair.other->send(Bytes(1), {}, soon()).code() == Code::failed);
    }
}

TEST(a_wait_ends_at_its_deadline) {
    Pair pair = make_pair_of(false);
    Bytes out(1);
    CHECK(pair.one->receive(out, RecordLink::Clock::now() + 1ms).code() == Code::unavailable);
    const Bytes more(64 << 20);  // than the socket holds, and nobody reads
    CHECK(pair.one->send(more, {}, RecordLink::Clock::now() + 1ms).code() == Code::unavailable);
}

TEST(a_deadline_ends_what_never_has_to_wait) {
    Pair pair = make_pair_of(false);
    CHECK(pair.one->send(Bytes(100), {}, soon()).ok());
    Bytes out(100);
    CHECK(pair.other->receive(out, RecordLink::Clock::now()).code() == Code::unavailable);
    CHECK(pair.other->send(out, {}, RecordLink::Clock::now()).code() == Code::unavailable);
}

TEST(a_wait_ends_when_it_is_shut_from_another_thread) {
    Pair pair = make_pair_of(true);
    std::thread other([&] { pair.one->shut(); });
    Bytes out(1);
    CHECK(pair.one->receive(out, soon()).code() == Code::failed);
    other.join();
}

namespace {

Bytes length_of(std::size_t size) {
    return {static_cast<std::uint8_t>(size), static_cast<std::uint8_t>(size >> 8),
            static_cast<std::uint8_t>(size >> 16), static_cast<std::uint8_t>(size >> 24)};
}

// A record that becomes shorter, and what it becomes.
struct Coded {
    explicit Coded(std::size_t length) {
        std::mt19937_64 random(length);
        record = kvo::test::make_codec_record(kvo::test::RecordKind::bfloat16, length, 64, random);
        RecordEncoder encoder;
        const std::span<const std::uint8_t> made = encoder.encode(record);
        coded.assign(made.begin(), made.end());
    }
    Bytes record, coded;
};

}  // namespace

TEST(records_come_coded_or_as_they_are_in_one_call) {
    for (const bool is_sealed : {false, true}) {
        Pair pair = make_pair_of(is_sealed);
        const Coded one(400'000);
        const std::size_t size = one.record.size();
        std::thread sender([&] {
            CHECK(pair.one->send(length_of(one.coded.size()), {}, soon()).ok());
            CHECK(pair.one->send(one.coded, {}, soon()).ok());
            CHECK(pair.one->send(length_of(0), {}, soon()).ok());
            CHECK(pair.one->send(one.record, {}, soon()).ok());
            CHECK(pair.one->send(length_of(one.coded.size()), {}, soon()).ok());
            CHECK(pair.one->send(one.coded, {}, soon()).ok());
        });
        Slots target(3, size, false);
        std::vector<CameRecord> came(3);
        const Result<CameCoded> told = pair.other->receive_coded_records(target.records(), came, soon());
        sender.join();
        CHECK(told.ok());
        CHECK_EQUAL(told.value().records, 2U);
        CHECK_EQUAL(told.value().coded_bytes, 2 * one.coded.size());
        for (std::size_t at = 0; at < 3; ++at) {
            const std::span slot(reinterpret_cast<const std::uint8_t*>(target.addresses[at]), size);
            CHECK(std::equal(slot.begin(), slot.end(), one.record.begin()));
            CHECK(came[at].is_whole && came[at].digest == digest_run(one.record, 0));
        }
    }
}

TEST(a_code_that_is_none_spoils_its_record_alone_and_writes_nowhere_else) {
    Pair pair = make_pair_of(false);
    const Coded one(8'000);
    const std::size_t size = one.record.size();
    Slots target(3, size, false);
    // The changed record lies between two others, so that bytes written outside of it are seen.
    target.addresses = {target.addresses[2], target.addresses[1], target.addresses[0]};
    for (std::size_t bit = 0; bit < 8 * one.coded.size() + 97; bit += 97) {
        Bytes changed = one.coded;
        if (bit < 8 * changed.size()) {
            changed[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        } else {
            changed.pop_back();
        }
        for (const Bytes* coded : {&one.coded, static_cast<const Bytes*>(&changed), &one.coded}) {
            CHECK(pair.one->send(length_of(coded->size()), {}, soon()).ok());
            CHECK(pair.one->send(*coded, {}, soon()).ok());
        }
        std::vector<CameRecord> came(3);
        CHECK(pair.other->receive_coded_records(target.records(), came, soon()).ok());
        for (const std::size_t at : {0, 2}) {
            CHECK(came[at].is_whole && came[at].digest == digest_run(one.record, 0));
            CHECK(std::equal(one.record.begin(), one.record.end(), target.bytes.begin() + at * size));
        }
        CHECK(!came[1].is_whole || came[1].digest != digest_run(one.record, 0));
    }
}

TEST(a_code_as_long_as_its_record_is_refused_unread) {
    Pair pair = make_pair_of(false);
    Slots target(1, 1000, false);
    std::vector<CameRecord> came(1);
    for (const std::size_t size : {std::size_t{1000}, std::size_t{0xffffffff}}) {
        CHECK(pair.one->send(length_of(size), {}, soon()).ok());
        const Result<CameCoded> told = pair.other->receive_coded_records(target.records(), came, soon());
        CHECK(!told.ok() && told.fault().code() == Code::failed);
    }
}

TEST(a_code_that_is_cut_off_ends_the_wait) {
    Pair pair = make_pair_of(false);
    Slots target(1, 1000, false);
    std::vector<CameRecord> came(1);
    CHECK(pair.one->send(length_of(500), {}, soon()).ok());
    CHECK(pair.one->send(Bytes(499), {}, soon()).ok());
    const auto ends = RecordLink::Clock::now() + 1ms;
    CHECK(pair.other->receive_coded_records(target.records(), came, ends).fault().code() == Code::unavailable);
    pair.one.reset();
    CHECK(pair.other->receive_coded_records(target.records(), came, soon()).fault().code() == Code::failed);
}
