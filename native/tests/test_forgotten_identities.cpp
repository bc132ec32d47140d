// Identities come and go while the cache is used: more of them than there are places.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include "cache/index_reader.hpp"
#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

Fingerprint name_of(std::uint32_t number) {
    Fingerprint name{};
    std::memcpy(name.data(), &number, sizeof(number));
    name.back() = 1;
    return name;
}

std::uint32_t open(CacheCore& core, std::uint32_t name, std::uint64_t record_bytes = 4096) {
    return value_of(core.namespaces().open(name_of(name), plain_geometry(record_bytes)));
}

// Opens namespaces until no place is free.
void fill(CacheCore& core) {
    for (std::uint32_t name = 0; core.stats().namespaces < kNamespaceLimit; ++name) {
        open(core, 1'000'000 + name);
    }
}

std::set<std::uint32_t> forget(SmallCache& cache, const std::vector<std::uint32_t>& kept = {}) {
    const std::vector<std::uint32_t> forgotten = cache->removals().forget_namespaces(kept);
    return {forgotten.begin(), forgotten.end()};
}

}  // namespace

TEST(identities_whose_blocks_have_gone_make_place_for_any_number_of_others) {
    SmallCache cache;
    const SessionId session = cache.session();
    const Space kept = cache.open(plain_geometry(), 200);
    const std::uint32_t empty = namespace_of(cache.open(plain_geometry(1024), 201));
    CHECK_EQUAL(cache.put(session, kept, chain(1, 3)), 3u);
    std::set<std::uint32_t> given;
    for (std::uint32_t name = 0; name < 5000; ++name) {
        auto number = cache->namespaces().open(name_of(name), plain_geometry());
        if (!number.ok()) {
            CHECK(number.fault().code() == Code::failed);
            CHECK_EQUAL(forget(cache, {empty}).size(), kNamespaceLimit - 2);
            number = cache->namespaces().open(name_of(name), plain_geometry());
        }
        const Space space = make_space(value_of(std::move(number)), 0);
        CHECK(given.insert(namespace_of(space)).second);
        if (name % 100 == 0) {
            std::vector<Ticket> tickets(1);
            CHECK_EQUAL(value_of(cache->reservations().reserve(session, 0, space, chain(name, 1), tickets)), 1u);
            CHECK(cache.commit(session, space, chain(name, 1), tickets)[0] == CommitOutcome::readable);
            CHECK(cache.has(space, name));
            CHECK_EQUAL(cache->removals().clear(namespace_of(space)), 1u);
        }
    }
    CHECK_EQUAL(given.size(), 5000u);
    CHECK_EQUAL(cache.open(plain_geometry(1024), 201), make_space(empty, 0));
    CHECK_EQUAL(cache.count_readable(kept, chain(1, 3)), 3u);
    CHECK(cache.take(session, kept, chain(1, 3)).has_value());
}

TEST(a_number_that_was_given_back_finds_nothing_and_leaves_nothing) {
    SmallCache cache;
    const SessionId session = cache.session();
    const Hashes hashes = chain(1, 3);
    const Space former = cache.open(plain_geometry(), 1);
    CHECK_EQUAL(cache.put(session, former, hashes), 3u);
    const std::unique_ptr<IndexReader> reader = value_of(IndexReader::open(duplicate(cache->memory().files().index)));
    const BoundaryQuery query{.name_space = namespace_of(former), .chain = hashes, .limit = 48};
    CHECK_EQUAL(value_of(reader->find_boundary(query)), 48u);
    fill(*cache);
    CHECK_EQUAL(cache->removals().clear(namespace_of(former)), 3u);
    std::vector<std::uint32_t> kept;
    for (std::uint32_t number = 1; number < kNamespaceLimit; ++number) {
        kept.push_back(number);
    }
    CHECK(forget(cache, kept) == std::set{namespace_of(former)});
    // Of the same place, the same geometry, and blocks of the same names.
    const Space other = cache.open(plain_geometry(), 2);
    CHECK_EQUAL(place_of_namespace(namespace_of(other)), place_of_namespace(namespace_of(former)));
    CHECK_EQUAL(cache.put(session, other, hashes), 3u);

    CHECK_EQUAL(cache.count_readable(former, hashes), 0u);
    CHECK(cache->leases().acquire(session, query).fault().code() == Code::invalid);
    CHECK(cache->leases().acquire_entries(session, former, hashes).fault().code() == Code::invalid);
    std::vector<Ticket> tickets(3);
    CHECK(cache->reservations().reserve(session, 0, former, hashes, tickets).fault().code() == Code::invalid);
    const Hashes fresh = chain(2, 1);
    const std::vector<Ticket> others = cache.reserve(session, other, fresh);
    std::vector<CommitOutcome> outcomes(1);
    const CommitBatch late{
        .space = former, .shard = 0, .tickets = others, .hashes = fresh, .parents = {}, .digests = {}};
    CHECK(cache->commits().commit(session, late, outcomes).code() == Code::invalid);
    CHECK(!cache.has(other, 2) && !cache.has(former, 2));
    CHECK_EQUAL(cache->removals().invalidate(former, hashes), 0u);
    CHECK_EQUAL(cache->removals().clear(namespace_of(former)), 0u);
    CHECK_EQUAL(cache->namespaces().shards_of(former), 0u);

    std::vector<std::uint8_t> found(3, 1);
    CHECK(reader->lookup(former, hashes, found).ok());
    CHECK_EQUAL(std::count(found.begin(), found.end(), 1), 0);
    const BoundaryQuery now{.name_space = namespace_of(other), .chain = hashes, .limit = 48};
    CHECK_EQUAL(value_of(reader->find_boundary(now)), 48u);
    const auto before = reader->find_boundary(query);
    CHECK(!before.ok() && before.fault().code() == Code::invalid);
    CHECK(cache.take(session, other, hashes).has_value());
}

TEST(what_is_reserved_leased_or_being_read_keeps_its_identity) {
    SmallCache cache;
    const SessionId session = cache.session();
    const Space reserved = cache.open(plain_geometry(), 1);
    const Space leased = cache.open(plain_geometry(1024), 2);
    const Space plain = cache.open(plain_geometry(), 3);
    const std::vector<Ticket> tickets = cache.reserve(session, reserved, chain(1, 1));
    CHECK_EQUAL(cache.put(session, leased, chain(1, 2)), 2u);
    const auto lease = cache.take(session, leased, chain(1, 2));
    CHECK_EQUAL(cache->removals().clear(namespace_of(leased)), 2u);
    CHECK(forget(cache) == std::set{namespace_of(plain)});

    cache.write(session, reserved, chain(1, 1), tickets);
    CHECK(cache.commit(session, reserved, chain(1, 1), tickets)[0] == CommitOutcome::readable);
    CHECK(cache.is_right(*lease, leased, chain(1, 2)));
    CHECK(cache->leases().release(session, lease->lease));
    CHECK(forget(cache) == std::set{namespace_of(leased)});
    CHECK(cache.is_served(session, reserved, 1));
    CHECK_EQUAL(cache->removals().clear(namespace_of(reserved)), 1u);
    CHECK(forget(cache) == std::set{namespace_of(reserved)});
}

// Each place has one identity after another, of two geometries in turn, while others go on with its numbers.
TEST(identities_are_forgotten_beside_their_calls) {
    SmallCache cache;
    const SessionId session = cache.session();
    const Hashes hashes = chain(1, 4);
    const Space kept = cache.open(plain_geometry(), 200);
    CHECK_EQUAL(cache.put(session, kept, hashes), 4u);
    fill(*cache);
    std::atomic<std::uint32_t> newest = 1;
    std::jthread reader([&](const std::stop_token& stop) {
        const std::unique_ptr<IndexReader> index =
            value_of(IndexReader::open(duplicate(cache->memory().files().index)));
        while (!stop.stop_requested()) {
            CHECK_EQUAL(
                value_of(index->find_boundary({.name_space = namespace_of(kept), .chain = hashes, .limit = 64})), 64u);
            const auto found = index->find_boundary({.name_space = newest.load(), .chain = hashes, .limit = 64});
            CHECK(found.ok() || found.fault().code() == Code::invalid);
        }
    });
    std::jthread caller([&](const std::stop_token& stop) {
        while (!stop.stop_requested()) {
            const Space space = make_space(newest.load(), 0);
            std::vector<Ticket> tickets(2);
            const auto decided =
                cache->reservations().reserve(session, 0, space, std::span(hashes).first(2 * kHashBytes), tickets);
            if (decided.ok()) {
                tickets.resize(decided.value());
                std::vector<std::uint64_t> addresses(tickets.size());
                CHECK(cache->reservations().locate(session, tickets, addresses).ok());
                std::vector<CommitOutcome> outcomes(tickets.size());
                const CommitBatch batch{.space = space,
                                        .shard = 0,
                                        .tickets = tickets,
                                        .hashes = std::span(hashes).first(tickets.size() * kHashBytes),
                                        .parents = {},
                                        .digests = {}};
                CHECK(cache->commits().commit(session, batch, outcomes).ok() || tickets.empty() ||
                      std::ranges::all_of(tickets, [](Ticket ticket) { return ticket == 0; }));
            }
            const auto acquired =
                cache->leases().acquire(session, {.name_space = namespace_of(space), .chain = hashes, .limit = 64});
            if (acquired.ok() && acquired.value().lease != 0) {
                CHECK(cache->leases().release(session, acquired.value().lease));
            }
        }
    });
    for (std::uint32_t name = 0; name < 500; ++name) {
        cache->removals().clear(newest.load());
        std::vector<std::uint32_t> others;
        for (std::uint32_t number = 1; number < kNamespaceLimit; ++number) {
            others.push_back(number);
        }
        std::erase(others, newest.load());
        // Not while a call goes on with it, or has just left a block.
        while (cache->removals().forget_namespaces(others).empty()) {
            cache->removals().clear(newest.load());
            std::this_thread::yield();
        }
        newest = open(*cache, name, name % 2 ? 1024 : 4096);
    }
    CHECK_EQUAL(cache.count_readable(kept, hashes), 4u);
}
