#include <atomic>
#include <random>
#include <thread>

#include "express_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

std::uint64_t number_of(AcquireOutcome outcome) { return static_cast<std::uint64_t>(outcome); }

void check_none(const Answer& answer, AcquireOutcome outcome, std::uint64_t boundary) {
    CHECK_EQUAL(answer.op, std::uint64_t{express::kAcquired});
    CHECK_EQUAL(answer.outcome, number_of(outcome));
    CHECK_EQUAL(answer.boundary, boundary);
    CHECK_EQUAL(answer.lease, 0u);
    CHECK(answer.groups.empty());
}

// A hit up to there, of all groups; then it is released by the call for it.
void check_boundary(ExpressScene& scene, const Answer& answer, std::uint64_t local, std::uint64_t boundary,
                    const std::vector<std::uint64_t>& of = {}) {
    CHECK(answer.is_hit());
    CHECK_EQUAL(answer.boundary, boundary);
    CHECK_EQUAL(answer.groups.size(), 5u);
    for (std::uint32_t group = 0; group < 5; ++group) {
        const BlockRange range = needed_blocks(scene.cache.group(scene.space(group)), local, boundary);
        CHECK_EQUAL(answer.groups[group].first, range.first);
        scene.check_group(answer.groups[group], group, scene.keys(group, 1, range.first, range.end), of);
    }
    CHECK_EQUAL(scene.cache->stats().leases, 1u);
    scene.tell(express::kRelease, {numbers({answer.lease})});
    scene.check_nothing_held();
}

}  // namespace

TEST(acquire_tells_the_slots_of_all_groups_and_the_digests_of_each_shard) {
    ExpressScene scene;
    scene.put_all(1, 256);
    for (const std::vector<std::uint64_t>& of : std::vector<std::vector<std::uint64_t>>{
             {}, {0}, {1}, {0, 1}, {1, 0}, {1, 1, 0, 1}, std::vector<std::uint64_t>(64, 1)}) {
        check_boundary(scene, scene.ask(express::kAcquire, scene.acquire_fields(1, 16, of)), 0, 256, of);
    }
}

TEST(what_is_not_sent_of_an_acquire_has_its_default) {
    ExpressScene scene;
    scene.put_all(1, 256);
    FieldList fields = scene.acquire_fields(1, 16);
    for (; fields.size() >= 2; fields.pop_back()) {
        check_boundary(scene, scene.ask(express::kAcquire, fields), 0, 256);
    }
    CHECK_EQUAL(scene.refuse(express::kAcquire, fields), std::uint64_t{express::kMalformed});
    const Field number = whole(scene.name_space);
    const Field hashes = blob(chain(1, 16));
    check_boundary(scene, scene.ask(express::kAcquire, {number, hashes, whole(70)}), 70, 256);
    check_boundary(scene, scene.ask(express::kAcquire, {number, hashes, whole(70), whole(255)}), 70, 192);
    check_boundary(scene, scene.ask(express::kAcquire, {number, hashes, whole(0), whole(255), whole(128)}), 0, 128);
    check_boundary(scene,
                   scene.ask(express::kAcquire, {number, hashes, whole(0), whole(100), whole(1), shards({1, 0})}), 0,
                   64, {1, 0});
}

TEST(acquire_entries_tells_its_one_group) {
    ExpressScene scene;
    scene.put_all(1, 256);
    for (std::uint32_t group = 0; group < 5; ++group) {
        const Hashes hashes = scene.keys(group, 1, 1, 2);
        for (const std::vector<std::uint64_t>& of : std::vector<std::vector<std::uint64_t>>{
                 {}, {0}, group == 0 ? std::vector<std::uint64_t>{1, 0} : std::vector<std::uint64_t>{0, 0}}) {
            const Answer answer = scene.ask(express::kAcquireEntries, scene.entries_fields(group, hashes, of));
            CHECK(answer.is_hit());
            CHECK_EQUAL(answer.boundary, 0u);
            CHECK_EQUAL(answer.groups.size(), 1u);
            CHECK_EQUAL(answer.groups[0].first, 0u);
            scene.check_group(answer.groups[0], group, hashes, of);
            CHECK_EQUAL(scene.cache->stats().leases, 1u);
            scene.tell(express::kRelease, {numbers({answer.lease})});
            scene.check_nothing_held();
        }
        FieldList bare = scene.entries_fields(group, hashes);
        bare.pop_back();
        scene.tell(express::kRelease, {numbers({scene.ask(express::kAcquireEntries, bare).lease})});
        bare.pop_back();
        CHECK_EQUAL(scene.refuse(express::kAcquireEntries, bare), std::uint64_t{express::kMalformed});
    }
    scene.check_nothing_held();
}

TEST(what_is_not_there_is_no_fault) {
    ExpressScene scene;
    scene.put_all(1, 256);
    check_none(scene.ask(express::kAcquire, scene.acquire_fields(2, 16, {0, 1})), AcquireOutcome::miss, 0);
    check_none(scene.ask(express::kAcquire, scene.acquire_fields(1, 0)), AcquireOutcome::miss, 0);
    check_none(scene.ask(express::kAcquire, {whole(scene.name_space), blob(chain(1, 16)), whole(256)}),
               AcquireOutcome::miss, 256);
    check_none(scene.ask(express::kAcquireEntries, scene.entries_fields(0, chain(2, 1), {1})), AcquireOutcome::miss, 0);
    check_none(scene.ask(express::kAcquireEntries, scene.entries_fields(3, {})), AcquireOutcome::miss, 0);
    scene.check_nothing_held();
}

TEST(a_session_gets_no_more_than_it_may_hold_and_nothing_when_it_is_not_open) {
    ExpressScene scene;
    scene.put_all(1, 256);
    const SessionId poor = scene.cache.session(2 * 2 * 3000);
    ExpressRights rights = scene.rights();
    rights.cache_session = poor;
    scene.renew(rights);
    const Answer two = scene.ask(express::kAcquireEntries, scene.entries_fields(0, chain(1, 2), {1, 0}));
    CHECK(two.is_hit());
    // One lease is held for both shards, which is all that the session may hold.
    const std::vector<std::uint64_t>& digests = two.groups[0].digests;
    CHECK_EQUAL(digests.size(), 4u);
    CHECK(std::ranges::find(digests, kNoDigest) == digests.end());
    CHECK_EQUAL(scene.cache->stats().leases, 1u);
    check_none(scene.ask(express::kAcquire, scene.acquire_fields(1, 16)), AcquireOutcome::over_limit, 0);
    CHECK(scene.cache->sessions().quarantine(poor));
    scene.tell(express::kRelease, {numbers({two.lease})});
    check_none(scene.ask(express::kAcquireEntries, scene.entries_fields(0, chain(1, 1))), AcquireOutcome::over_limit,
               0);
    scene.tell(express::kInvalidate, {whole(scene.name_space), whole(0), blob(chain(1, 2)), whole(1)});
    CHECK_EQUAL(scene.cache.count_readable(scene.space(0), chain(1, 16)), 16u);
    scene.check_nothing_held();
}

TEST(a_hit_that_needs_no_block_has_no_lease) {
    ExpressScene scene;
    Geometry chunks = plain_geometry();
    chunks.groups[0].rule = BoundaryRule::chunk;
    chunks.groups[0].window = 64;
    scene.name_space = namespace_of(scene.cache.open(chunks, 9));
    scene.renew();
    const Answer answer = scene.ask(express::kAcquire, scene.acquire_fields(1, 8, {0, 0}));
    CHECK(answer.is_hit());
    CHECK_EQUAL(answer.boundary, 128u);
    CHECK_EQUAL(answer.lease, 0u);
    CHECK_EQUAL(answer.groups.size(), 1u);
    CHECK(answer.groups[0].addresses.empty() && answer.groups[0].digests.empty());
    scene.check_nothing_held();
}

TEST(loads_name_what_there_is) {
    ExpressScene scene;
    scene.put_all(1, 256);
    using express::kAcquire;
    using express::kAcquireEntries;
    using express::kInvalidate;
    constexpr std::uint64_t kNotFound = express::kNotFound;
    constexpr std::uint64_t kMalformed = express::kMalformed;
    const Field right = whole(scene.name_space);
    const Field wrong = whole(scene.name_space + 1);
    const Field hashes = blob(chain(1, 2));
    CHECK_EQUAL(scene.refuse(kAcquire, {wrong, hashes}), kNotFound);
    CHECK_EQUAL(scene.refuse(kAcquireEntries, {wrong, whole(0), hashes}), kNotFound);
    CHECK_EQUAL(scene.refuse(kInvalidate, {wrong, whole(0), hashes}), kNotFound);
    for (const std::uint64_t group : {5u, 63u, 64u, 65535u}) {
        CHECK_EQUAL(scene.refuse(kAcquireEntries, {right, whole(group), hashes}), kNotFound);
        CHECK_EQUAL(scene.refuse(kInvalidate, {right, whole(group), hashes}), kNotFound);
    }
    // Of all groups the shard of any will do, of one group only its own.
    for (const std::vector<std::uint64_t>& of : std::vector<std::vector<std::uint64_t>>{{2}, {0, 2}, {65535}}) {
        CHECK_EQUAL(scene.refuse(kAcquire, scene.acquire_fields(1, 16, of)), kNotFound);
        CHECK_EQUAL(scene.refuse(kAcquireEntries, scene.entries_fields(0, chain(1, 2), of)), kNotFound);
    }
    CHECK_EQUAL(scene.refuse(kAcquireEntries, scene.entries_fields(1, chain(1, 2), {0, 1})), kNotFound);
    // Values that are beyond their field's kind or the terms.
    CHECK_EQUAL(scene.refuse(kAcquire, scene.acquire_fields(1, 513)), kMalformed);
    CHECK_EQUAL(scene.refuse(kAcquireEntries, scene.entries_fields(0, chain(1, 513))), kMalformed);
    CHECK_EQUAL(scene.refuse(kAcquire, scene.acquire_fields(1, 16, std::vector<std::uint64_t>(65, 0))), kMalformed);
    CHECK_EQUAL(scene.refuse(kAcquire, scene.acquire_fields(1, 16, {65536})), kMalformed);
    CHECK_EQUAL(scene.refuse(kAcquire, {right, hashes, whole(0), whole(99), whole(0)}), kMalformed);
    CHECK_EQUAL(scene.refuse(kAcquire, {right, hashes, whole(0), whole(99), whole(1ull << 32)}), kMalformed);
    CHECK_EQUAL(scene.refuse(kAcquire, {whole(1ull << 32 | scene.name_space), hashes}), kMalformed);
    CHECK_EQUAL(scene.refuse(kAcquireEntries, {right, whole(65536), hashes}), kMalformed);
    const Hashes two = chain(1, 2);
    CHECK_EQUAL(scene.refuse(kAcquire, {right, blob(std::span(two).first(33))}), kMalformed);
    CHECK_EQUAL(scene.refuse(kAcquireEntries, {right, whole(0), blob(std::span(two).first(63))}), kMalformed);
    CHECK_EQUAL(scene.refuse(kInvalidate, {right, whole(0), blob(chain(1, 129))}), kMalformed);
    CHECK_EQUAL(scene.refuse(kInvalidate, {right, whole(0)}), kMalformed);
    CHECK_EQUAL(scene.refuse(express::kRelease, {numbers(std::vector<std::uint64_t>(17, 1))}), kMalformed);
    CHECK_EQUAL(scene.refuse(express::kRelease, {}), kMalformed);
    CHECK(scene.ask(kAcquire, scene.acquire_fields(1, 512)).is_hit());
}

TEST(an_answer_that_is_too_large_leases_nothing) {
    ExpressScene fit;
    fit.put_all(1, 256);
    std::size_t served = 0;
    std::size_t refused = 0;
    for (std::size_t frame_bytes = 64; frame_bytes < 1200; frame_bytes += 4) {
        fit.terms = small_terms(frame_bytes);
        fit.renew();
        const FieldList fields = frame_bytes % 8 == 0 ? fit.acquire_fields(1, 16, {1, 0, 1})
                                                      : fit.entries_fields(0, chain(1, 16), {1, 0, 1});
        const Answer answer = fit.ask(frame_bytes % 8 == 0 ? express::kAcquire : express::kAcquireEntries, fields);
        if (answer.op == express::kError) {
            ++refused;
            CHECK_EQUAL(answer.code, std::uint64_t{express::kTooLarge});
        } else {
            ++served;
            CHECK(answer.frame.size() <= frame_bytes);
            fit.tell(express::kRelease, {numbers({answer.lease})});
        }
        fit.service->settle(true);
        fit.check_nothing_held();
    }
    CHECK(served > 50 && refused > 50);
}

TEST(release_ends_leases_of_its_own_session_alone) {
    ExpressScene scene;
    scene.put_all(1, 256);
    const SessionId other = scene.cache.session();
    const auto others = scene.cache.take(other, scene.space(0), chain(1, 1));
    std::vector<LeaseId> leases = {others->lease, 0, 12345678901, ~0ull};
    for (int i = 0; i < 3; ++i) {
        leases.push_back(scene.ask(express::kAcquire, scene.acquire_fields(1, 16)).lease);
    }
    leases.push_back(leases.back());
    scene.tell(express::kRelease, {numbers(leases)});
    CHECK_EQUAL(scene.cache->sessions().held_bytes(scene.session), 0u);
    CHECK_EQUAL(scene.cache->stats().leases, 1u);
    CHECK(scene.cache->leases().release(other, others->lease));
    scene.tell(express::kRelease, {numbers({})});
}

TEST(invalidated_blocks_are_gone) {
    ExpressScene scene;
    scene.put_all(1, 256);
    const Answer held = scene.ask(express::kAcquire, scene.acquire_fields(1, 16));
    scene.tell(express::kInvalidate, {whole(scene.name_space), whole(0), blob(chain(1, 2, 8)), whole(1)});
    CHECK_EQUAL(scene.cache.count_readable(scene.space(0), chain(1, 16)), 14u);
    CHECK_EQUAL(scene.cache.count_readable(scene.space(1), chain(1, 16)), 16u);
    scene.check_group(held.groups[0], 0, chain(1, 16), {});  // leases on them stay good
    scene.tell(express::kRelease, {numbers({held.lease})});
    check_boundary(scene, scene.ask(express::kAcquire, scene.acquire_fields(1, 16, {0})), 0, 128, {0});
}

// A block is forgotten and written again, with other bytes, between the look-ups of its shards.
TEST(digests_are_of_the_slots_that_are_leased) {
    ExpressScene scene;
    scene.put_all(1, 64);
    const Space space = scene.space(0);
    const Hashes hashes = chain(1, 1);
    std::atomic<bool> is_over = false;
    std::thread writer([&] {
        const SessionId session = scene.cache.session();
        for (std::uint8_t version = 1; !is_over.load(); ++version) {
            scene.cache->removals().invalidate(space, hashes);
            const std::vector<Ticket> tickets = scene.cache.reserve(session, space, hashes);
            const std::vector<std::uint64_t> addresses = scene.cache.locate(session, tickets);
            for (std::uint32_t shard = 0; shard < 2; ++shard) {
                const std::span<std::byte> record = scene.cache.record(space, addresses.at(0), shard);
                std::ranges::fill(record, std::byte(version + shard));
                scene.cache.commit(session, space, hashes, tickets, shard);
            }
        }
    });
    std::vector<std::uint64_t> of(64, 1);
    of[0] = 0;
    std::size_t hits = 0;
    std::string wrong;
    // Without a hit it goes on: on a busy machine the writer may have no turn for long.
    for (int round = 0; round < (hits == 0 ? 20'000'000 : 20'000) && hits < 3000; ++round) {
        const Answer answer = scene.ask(express::kAcquireEntries, scene.entries_fields(0, hashes, of));
        if (!answer.is_hit()) {
            std::this_thread::yield();
            continue;
        }
        ++hits;
        const LeasedGroup& leased = answer.groups.at(0);
        for (std::size_t at = 0; at < of.size(); ++at) {
            const auto shard = static_cast<std::uint32_t>(of[at]);
            const std::uint64_t right = digest_by_hand(scene.cache, space, leased.addresses[0], hashes, shard);
            if (leased.digests[at] != right) {
                wrong = "of shard " + std::to_string(shard);
            }
        }
        scene.tell(express::kRelease, {numbers({answer.lease})});
        scene.service->settle(true);
    }
    is_over.store(true);
    writer.join();
    CHECK_EQUAL(wrong, "");
    CHECK(hits > 0);
    scene.check_nothing_held();
}
