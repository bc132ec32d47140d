// Calls and answers of express channels, byte by byte, and a small cache of all kinds of groups behind a service.
#pragma once

#include <atomic>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "hybrid_fixture.hpp"
#include "service/block_service.hpp"

namespace kvo::test {

constexpr std::uint64_t kSession = 0x7000000000000007;
constexpr std::uint64_t kBootId = 0x1122334455667788;
constexpr std::uint64_t kNow = 1'000'000;

inline ExpressTerms small_terms(std::size_t frame_bytes = 1 << 20) {
    return {.boot_id = kBootId, .frame_bytes = frame_bytes, .blocks = 512, .batch = 128, .leases = 16, .shards = 64};
}

// A shared pointer to a cache that the scene owns.
inline std::shared_ptr<CacheCore> borrow(SmallCache& cache) { return {std::shared_ptr<void>(), cache.operator->()}; }

// A field writes one value of a message, behind the message's head.
using Field = std::function<void(frames::PlainWriter&)>;
using FieldList = std::vector<Field>;

inline Field whole(std::uint64_t value) {
    return [value](frames::PlainWriter& writer) { writer.whole(value); };
}
inline Field blob(std::span<const std::uint8_t> bytes) {
    const std::string kept(bytes.begin(), bytes.end());
    return [kept](frames::PlainWriter& writer) { writer.blob(kept); };
}
inline Field numbers(std::vector<std::uint64_t> values) {
    return [values](frames::PlainWriter& writer) { writer.blob(express::bytes_of(values)); };
}
inline Field shards(std::vector<std::uint64_t> values) {
    return [values](frames::PlainWriter& writer) {
        writer.array(values.size());
        for (const std::uint64_t value : values) {
            writer.whole(value);
        }
    };
}
inline Field raw(std::string bytes) {
    return [bytes](frames::PlainWriter& writer) { writer.frame.append(bytes); };
}

struct Head {
    std::uint64_t op = 0;
    std::uint64_t number = 0;
    std::uint64_t session = kSession;
    std::uint64_t expires_ns = 0;
};

// Without its length.
inline std::string make_frame(const Head& head, const FieldList& fields) {
    frames::PlainWriter writer;
    writer.array(4 + fields.size());
    for (const std::uint64_t number : {head.op, head.number, head.session, head.expires_ns}) {
        writer.whole(number);
    }
    for (const Field& field : fields) {
        field(writer);
    }
    return std::move(writer.frame);
}

inline std::span<const std::uint8_t> bytes_in(const std::string& text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// Puts the frame's length before it.
inline std::string pack(const std::string& frame) {
    const auto size = static_cast<std::uint32_t>(frame.size());
    return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + frame;
}

// Any of the answers there are.
struct Answer {
    std::uint64_t op = 0;
    std::uint64_t number = 0;
    std::uint64_t code = 0;  // of an error, and what it is about
    std::uint64_t about_op = 0;
    bool is_retryable = false;
    std::uint64_t outcome = 0;
    std::uint64_t boundary = 0;
    LeaseId lease = 0;
    std::vector<LeasedGroup> groups;
    std::vector<Ticket> tickets;
    std::vector<std::uint64_t> addresses;
    std::string frame;

    bool is_hit() const {
        return op == express::kAcquired && outcome == static_cast<std::uint64_t>(AcquireOutcome::hit);
    }
};

inline std::vector<std::uint64_t> read_numbers(frames::PlainReader& reader) {
    const std::span<const std::uint8_t> bytes = reader.blob();
    CHECK_EQUAL(bytes.size() % sizeof(std::uint64_t), 0u);
    std::vector<std::uint64_t> found(bytes.size() / sizeof(std::uint64_t));
    if (!found.empty()) {
        std::memcpy(found.data(), bytes.data(), bytes.size());
    }
    return found;
}

// Whole, and nothing but what it must be. Throws NotPlain.
inline Answer parse_answer(std::span<const std::uint8_t> frame) {
    frames::PlainReader reader(frame);
    const std::size_t items = reader.array(frames::kArrayItems);
    Answer answer;
    answer.frame.assign(frame.begin(), frame.end());
    answer.op = reader.whole();
    answer.number = reader.whole();
    CHECK_EQUAL(reader.whole(), kBootId);
    if (answer.op == express::kError) {
        CHECK_EQUAL(items, 8u);
        answer.code = reader.whole();
        reader.skip(1);
        answer.is_retryable = reader.truth();
        CHECK_EQUAL(reader.whole(), 0u);
        answer.about_op = reader.whole();
    } else if (answer.op == express::kAcquired) {
        CHECK_EQUAL(items, 8u);
        answer.outcome = reader.whole();
        answer.boundary = reader.whole();
        answer.lease = reader.whole();
        answer.groups.resize(reader.array(kGroupLimit));
        for (LeasedGroup& group : answer.groups) {
            CHECK_EQUAL(reader.array(frames::kArrayItems), 3u);
            group.first = reader.whole();
            group.addresses = read_numbers(reader);
            group.digests = read_numbers(reader);
        }
        CHECK_EQUAL(reader.whole(), 0u);
    } else if (answer.op == express::kCreditsGranted) {
        CHECK_EQUAL(items, 6u);
        answer.tickets = read_numbers(reader);
        answer.addresses = read_numbers(reader);
        CHECK_EQUAL(answer.addresses.size(), answer.tickets.size());
        CHECK_EQUAL(reader.whole(), 0u);
    } else {
        CHECK_EQUAL(answer.op, std::uint64_t{express::kDone});
        CHECK_EQUAL(items, 3u);
    }
    CHECK(reader.at_end());
    return answer;
}

inline Answer read_answer(std::span<const std::uint8_t> frame) {
    try {
        return parse_answer(frame);
    } catch (const frames::NotPlain&) {
        fail(__FILE__, __LINE__, "an answer of " + std::to_string(frame.size()) + " bytes is no message");
    }
}

// All that lies one behind the other, but for a last one that was cut off.
inline std::vector<Answer> read_whole_answers(const std::string& out) {
    std::vector<Answer> answers;
    for (std::span<const std::uint8_t> rest = bytes_in(out); rest.size() >= sizeof(std::uint32_t);) {
        std::uint32_t size = 0;
        std::memcpy(&size, rest.data(), sizeof(size));
        rest = rest.subspan(sizeof(size));
        if (rest.size() < size) {
            break;
        }
        answers.push_back(read_answer(rest.first(size)));
        rest = rest.subspan(size);
    }
    return answers;
}

inline std::vector<Answer> read_answers(const std::string& out) {
    std::vector<Answer> answers = read_whole_answers(out);
    std::size_t bytes = 0;
    for (const Answer& answer : answers) {
        bytes += sizeof(std::uint32_t) + answer.frame.size();
    }
    CHECK_EQUAL(bytes, out.size());
    return answers;
}

// A service, and one process that calls.
struct ExpressScene : Hybrid {
    explicit ExpressScene(const ExpressTerms& terms_of_all = small_terms(), CacheOptions options = small_options())
        : Hybrid(std::move(options)), terms(terms_of_all) {
        renew();
    }

    ExpressRights rights() const {
        return {.session = kSession, .cache_session = session, .name_space = name_space, .tenant = 0, .owner = 5};
    }
    // Another channel, with nothing sent yet.
    void renew() { renew(rights()); }
    void renew(const ExpressRights& others) {
        service = std::make_unique<BlockService>(borrow(cache), others, terms, is_draining, log);
        last_one_way = 0;
    }

    // Serves one frame. Returns the answers to it, and whether the channel goes on.
    std::pair<std::vector<Answer>, bool> serve(const std::string& frame) {
        std::string out = "before";
        const bool goes_on = service->serve(bytes_in(frame), kNow, out);
        CHECK(out.starts_with("before"));
        return {read_answers(out.substr(6)), goes_on};
    }
    Answer ask(std::uint64_t op, const FieldList& fields) {
        const auto [answers, goes_on] = serve(make_frame({.op = op, .number = ++last_request}, fields));
        CHECK(goes_on);
        CHECK_EQUAL(answers.size(), 1u);
        CHECK_EQUAL(answers[0].number, last_request);
        return answers[0];
    }
    void tell(std::uint64_t op, const FieldList& fields) {
        const auto [answers, goes_on] = serve(make_frame({.op = op, .number = ++last_one_way}, fields));
        CHECK(goes_on);
        CHECK(answers.empty());
    }
    // The code; what was refused changes nothing but the numbers, and the channel goes on.
    std::uint64_t refuse(std::uint64_t op, const FieldList& fields) {
        const CacheStats before = cache->stats();
        const std::uint64_t number = op >= 32 && op < 48 ? ++last_one_way : ++last_request;
        const auto [answers, goes_on] = serve(make_frame({.op = op, .number = number}, fields));
        CHECK(goes_on);
        CHECK_EQUAL(answers.size(), 1u);
        CHECK_EQUAL(answers[0].op, std::uint64_t{express::kError});
        CHECK_EQUAL(answers[0].number, number);
        CHECK_EQUAL(answers[0].about_op, op);
        CHECK_EQUAL(answers[0].is_retryable, answers[0].code == express::kInternal);
        const CacheStats after = cache->stats();
        CHECK(after.leases == before.leases && after.reserved == before.reserved && after.readable == before.readable);
        return answers[0].code;
    }

    FieldList acquire_fields(std::uint64_t prompt, std::size_t hashes, std::vector<std::uint64_t> of = {}) const {
        return {whole(name_space), blob(chain(prompt, hashes)), whole(0), whole(~0ull),
                whole(1),          shards(std::move(of))};
    }
    FieldList entries_fields(std::uint32_t group, const Hashes& hashes, std::vector<std::uint64_t> of = {}) const {
        return {whole(name_space), whole(group), blob(hashes), shards(std::move(of))};
    }
    FieldList credits_fields(std::uint32_t group, std::uint64_t count, const Hashes& hashes = {}) const {
        return {whole(name_space), whole(group), whole(count), blob(hashes)};
    }
    FieldList publish_fields(std::uint32_t group, std::uint32_t shard, const std::vector<Ticket>& tickets,
                             const Hashes& hashes, const Hashes& parents = {},
                             const std::vector<std::uint64_t>& digests = {}, std::uint64_t tenant = 0,
                             std::uint64_t more_shards = 0) const {
        return {whole(name_space), whole(group),     whole(shard),  numbers(tickets),  blob(hashes),
                blob(parents),     numbers(digests), whole(tenant), whole(more_shards)};
    }
    // One good call of every operation, with an empty or void content where it changes something.
    std::vector<std::pair<std::uint64_t, FieldList>> good_calls() {
        const Hashes hashes = chain(1, 4);
        return {{express::kAcquire, acquire_fields(1, 16, {0, 1})},
                {express::kAcquireEntries, entries_fields(0, hashes, {1})},
                {express::kCredits, credits_fields(0, 3)},
                {express::kCredits, credits_fields(1, 0, chain(8, 2))},
                {express::kMark, {}},
                {express::kPublish, publish_fields(0, 1, {1, 2}, chain(1, 2), chain(2, 2), {3, 4})},
                {express::kAbort, {numbers({1, 2})}},
                {express::kRelease, {numbers({1, 2, 3})}},
                {express::kInvalidate, {whole(name_space), whole(0), blob(chain(9, 2)), whole(1)}}};
    }

    // The addresses are of these blocks' records, byte by byte, and so are the digests of all shards asked for.
    void check_group(const LeasedGroup& leased, std::uint32_t group, const Hashes& hashes,
                     const std::vector<std::uint64_t>& of) {
        const std::size_t count = hashes.size() / kHashBytes;
        CHECK_EQUAL(leased.addresses.size(), count);
        CHECK_EQUAL(leased.digests.size(), count * of.size());
        for (std::size_t i = 0; i < count; ++i) {
            CHECK(has_pattern(cache.record(space(group), leased.addresses[i]), hash_at(hashes, i), space(group), 0));
            for (std::size_t at = 0; at < of.size(); ++at) {
                const auto shard = static_cast<std::uint32_t>(of[at]);
                const bool has_shard = shard < cache.group(space(group)).shards;
                CHECK_EQUAL(leased.digests[at * count + i],
                            has_shard
                                ? digest_by_hand(cache, space(group), leased.addresses[i], hash_at(hashes, i), shard)
                                : kNoDigest);
            }
        }
    }
    void check_nothing_held() {
        CHECK_EQUAL(cache->stats().leases, 0u);
        CHECK_EQUAL(cache->stats().reserved, 0u);
        CHECK_EQUAL(cache->sessions().held_bytes(session), 0u);
    }

    ExpressTerms terms;
    std::atomic<bool> is_draining = false;
    StoredLog log{100};
    std::unique_ptr<BlockService> service;
    std::uint64_t last_request = 0;
    std::uint64_t last_one_way = 0;
};

}  // namespace kvo::test
