#include <algorithm>
#include <set>

#include "cache_fixture.hpp"
#include "index/lookup.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

using Outcomes = std::vector<CommitOutcome>;

struct Written {
    Written() : space(cache.open()), session(cache.session()) {}

    // One reserved and written entry.
    Ticket reserve(std::uint64_t key, SessionId of) {
        const std::vector<Ticket> tickets = cache.reserve(of, space, chain(key, 1));
        cache.write(of, space, chain(key, 1), tickets);
        return tickets.at(0);
    }
    CommitOutcome commit(std::uint64_t key, SessionId of, Ticket ticket) {
        return cache.commit(of, space, chain(key, 1), std::vector{ticket})[0];
    }

    SmallCache cache;
    Space space;
    SessionId session;
};

// Names that share a chain of the table in this space, as a process can choose them that reads the index's seed.
Hashes names_of_one_chain(const SmallCache& cache, Space space, std::size_t count, std::uint64_t first) {
    const IndexFile index = cache.open_index();
    Hashes names;
    for (std::uint64_t prompt = first; names.size() < count * kHashBytes; ++prompt) {
        const Hashes one = chain(prompt, 1);
        if ((mix_key({read_hash(one.data()), space}, index.view().header->seed) & 1023) == 0) {
            std::ranges::copy(one, std::back_inserter(names));
        }
    }
    return names;
}

}  // namespace

TEST(a_record_is_found_once_it_is_committed) {
    Written made;
    const Hashes hashes = chain(1, 300);  // more than is done under one hold of the lock
    const std::vector<Ticket> tickets = made.cache.reserve(made.session, made.space, hashes);
    CHECK_EQUAL(tickets.size(), 300u);
    CHECK_EQUAL(std::set<Ticket>(tickets.begin(), tickets.end()).size(), 300u);
    const auto addresses = made.cache.locate(made.session, tickets);
    CHECK_EQUAL(std::set<std::uint64_t>(addresses.begin(), addresses.end()).size(), 300u);
    CHECK_EQUAL(made.cache.count_readable(made.space, hashes), 0u);
    CHECK_EQUAL(made.cache->stats().reserved, 300u);
    CHECK_EQUAL(made.cache->sessions().held_bytes(made.session), 300u * 4096);
    made.cache.write(made.session, made.space, hashes, tickets);
    const std::uint64_t version = made.cache->version();
    CHECK((made.cache.commit(made.session, made.space, hashes, tickets) == Outcomes(300, CommitOutcome::readable)));
    CHECK(made.cache->version() > version);
    CHECK_EQUAL(made.cache->sessions().held_bytes(made.session), 0u);
    CHECK_EQUAL(made.cache.count_readable(made.space, hashes), 300u);
    const auto lease = made.cache.take(made.session, made.space, hashes);
    CHECK(lease && lease->groups[0].addresses == addresses);

    // Readable blocks need no slot.
    Hashes more = chain(1, 302);
    const std::vector<Ticket> again = made.cache.reserve(made.session, made.space, more);
    CHECK_EQUAL(again.size(), 302u);
    CHECK(std::all_of(again.begin(), again.begin() + 300, [](Ticket ticket) { return ticket == 0; }));
    CHECK(again[300] != 0 && again[301] != 0);
    const auto located = made.cache.locate(made.session, again);
    CHECK(located[0] == kNoAddress && located[300] != kNoAddress);
    std::vector<Ticket> unnamed(7);
    CHECK_EQUAL(value_of(made.cache->reservations().reserve(made.session, 0, made.space, {}, unnamed)), 7u);
    CHECK_EQUAL(std::ranges::count(unnamed, Ticket{0}), 0);
    CHECK_EQUAL(made.cache->stats().reserved, 9u);
}

TEST(readable_only_with_all_shards) {
    SmallCache cache;
    const Space space = cache.open(plain_geometry(1000, 3));
    const SessionId session = cache.session();
    const Hashes hashes = chain(1, 2);
    const std::vector<Ticket> tickets = cache.reserve(session, space, hashes);
    cache.write(session, space, hashes, tickets);
    const Outcomes incomplete(2, CommitOutcome::incomplete);
    CHECK(cache.commit(session, space, hashes, tickets, 2) == incomplete);
    CHECK(cache.commit(session, space, hashes, tickets, 0) == incomplete);
    CHECK(cache.commit(session, space, hashes, tickets, 0) == incomplete);  // the same shard again is no other one
    CHECK_EQUAL(cache.count_readable(space, hashes), 0u);
    // Another name than that of the first shard, and a shard that there is not.
    CHECK((cache.commit(session, space, chain(5, 2), tickets, 1) == Outcomes(2, CommitOutcome::stale)));
    Outcomes outcomes(2);
    const CommitBatch fourth{
        .space = space, .shard = 3, .tickets = tickets, .hashes = hashes, .parents = {}, .digests = {}};
    CHECK(cache->commits().commit(session, fourth, outcomes).code() == Code::invalid);
    CHECK((cache.commit(session, space, hashes, tickets, 1) == Outcomes(2, CommitOutcome::readable)));
    for (std::uint32_t shard = 0; shard < 3; ++shard) {
        const Acquired acquired =
            value_of(cache->leases().acquire_entries(session, space, hashes, std::span(&shard, 1)));
        CHECK(cache.is_right(acquired, space, hashes));
        for (std::size_t i = 0; i < 2; ++i) {
            const auto record = cache.record(space, acquired.groups[0].addresses[i], shard);
            const Fingerprint name = fingerprint(1);
            CHECK_EQUAL(acquired.groups[0].digests[i],
                        digest_record({reinterpret_cast<const std::uint8_t*>(record.data()), record.size()},
                                      {name, hash_at(hashes, i).first<kHashBytes>(), 0, shard}));
        }
    }
}

TEST(of_two_writers_the_first_commit_wins) {
    Written made;
    const SessionId other = made.cache.session();
    const Ticket first = made.reserve(1, made.session);
    const Ticket second = made.reserve(1, other);
    CHECK(first != second);
    CHECK(made.commit(1, other, second) == CommitOutcome::readable);
    CHECK(made.commit(1, made.session, first) == CommitOutcome::duplicate);
    CHECK(made.commit(1, made.session, first) == CommitOutcome::stale);
    const CacheStats stats = made.cache->stats();
    CHECK_EQUAL(stats.duplicates, 1u);
    CHECK_EQUAL(stats.used_bytes, 4096u);
    CHECK_EQUAL(stats.reserved, 0u);
    CHECK_EQUAL(made.cache->sessions().held_bytes(made.session), 0u);
    CHECK(made.cache.is_served(other, made.space, 1));
}

TEST(tickets_that_are_not_valid_change_nothing) {
    Written made;
    const SessionId other = made.cache.session();
    const Ticket used = made.reserve(1, made.session);
    CHECK(made.commit(1, made.session, used) == CommitOutcome::readable);
    const Ticket aborted = made.reserve(2, made.session);
    CHECK_EQUAL(made.cache->reservations().abort(made.session, std::vector{aborted, aborted}), 1u);
    const Ticket others = made.reserve(3, other);
    const SessionId ended = made.cache.session();
    const Ticket of_ended = made.reserve(4, ended);
    CHECK(made.cache->sessions().quarantine(ended));
    CHECK_EQUAL(made.cache->reclaim_ended(), 1u);
    const Ticket reused = made.reserve(5, made.session);  // has a number of one of those above
    const std::vector<Ticket> stale = {
        used, aborted, others, of_ended, 0, reused + (1ull << 32), 1ull << 32 | 77777, ~0ull, Ticket{entry_of(reused)}};
    const CacheStats before = made.cache->stats();
    for (const Ticket ticket : stale) {
        CHECK(made.commit(6, made.session, ticket) == CommitOutcome::stale);
        CHECK_EQUAL(made.cache->reservations().abort(made.session, std::vector{ticket}), 0u);
        std::uint64_t address = 0;
        CHECK_EQUAL(made.cache->reservations().locate(made.session, std::vector{ticket}, std::span(&address, 1)).ok(),
                    ticket == 0);
    }
    CHECK(made.commit(4, ended, of_ended) == CommitOutcome::stale);
    CHECK_EQUAL(made.cache->reservations().abort(ended, std::vector{of_ended}), 0u);
    const CacheStats after = made.cache->stats();
    CHECK(after.reserved == before.reserved && after.readable == before.readable &&
          after.used_bytes == before.used_bytes);
    CHECK(!made.cache.has(made.space, 6));
    CHECK(made.commit(3, other, others) == CommitOutcome::readable);
    CHECK(made.commit(5, made.session, reused) == CommitOutcome::readable);
    for (const std::uint64_t key : {1u, 3u, 5u}) {
        CHECK(made.cache.is_served(other, made.space, key));
    }
}

TEST(a_ticket_serves_its_own_group_only) {
    SmallCache cache;
    const Space space = cache.open(hybrid_geometry());
    const SessionId session = cache.session();
    const std::vector<Ticket> tickets = cache.reserve(session, space, chain(1, 1));
    CHECK(cache.commit(session, space + 1, chain(1, 1), tickets)[0] == CommitOutcome::stale);
    CHECK_EQUAL(cache->stats().reserved, 1u);
}

TEST(a_quarantined_session_commits_nothing_and_may_abort) {
    Written made;
    const Ticket ticket = made.reserve(1, made.session);
    CHECK(made.cache->sessions().quarantine(made.session));
    CHECK(made.commit(1, made.session, ticket) == CommitOutcome::stale);
    CHECK(made.cache.reserve(made.session, made.space, chain(2, 1)).empty());
    CHECK_EQUAL(made.cache->reservations().abort(made.session, std::vector{ticket}), 1u);
}

TEST(arguments_that_do_not_fit_are_refused_in_one_line_and_change_nothing) {
    Written made;
    CacheCore& core = *made.cache;
    const std::vector<Ticket> tickets = made.cache.reserve(made.session, made.space, chain(1, 2));
    const Hashes two = chain(1, 2);
    const Hashes one = chain(1, 1);
    std::vector<Ticket> wanted(2);
    Outcomes outcomes(2);
    Outcomes too_few(1);
    std::vector<std::uint64_t> digests = {1, kNoDigest};
    std::vector<std::uint64_t> addresses(1);
    std::vector<std::uint8_t> found(1);
    CommitBatch good{.space = made.space, .shard = 0, .tickets = tickets, .hashes = two, .parents = {}, .digests = {}};
    const auto with = [&](auto change) {
        CommitBatch batch = good;
        change(batch);
        return core.commits().commit(made.session, batch, outcomes);
    };
    const auto fault = [](const auto& result) { return result.ok() ? Status() : result.fault(); };
    const std::vector<Status> refused = {
        fault(core.reservations().reserve(made.session, 0, made.space, one, wanted)),
        fault(core.reservations().reserve(made.session, 0, made.space + 1, two, wanted)),
        fault(core.reservations().reserve(made.session, 0, make_space(9, 0), two, wanted)),
        fault(core.reservations().reserve(made.session, 1, made.space, two, wanted)),
        core.reservations().locate(made.session, tickets, addresses),
        core.search().lookup(made.space, two, found),
        core.commits().commit(made.session, good, too_few),
        with([&](CommitBatch& batch) { batch.hashes = one; }),
        with([&](CommitBatch& batch) { batch.parents = one; }),
        with([&](CommitBatch& batch) { batch.digests = std::span(digests).first(1); }),
        with([&](CommitBatch& batch) { batch.digests = digests; }),
        with([&](CommitBatch& batch) { batch.shard = 1; }),
        with([&](CommitBatch& batch) { batch.shard = ~0u; }),
        with([&](CommitBatch& batch) { batch.space = made.space + 1; }),
    };
    for (const Status& status : refused) {
        CHECK(status.code() == Code::invalid);
        CHECK(!status.message().empty() && status.message().find('\n') == std::string::npos);
    }
    CHECK_EQUAL(core.stats().reserved, 2u);
    CHECK_EQUAL(core.stats().used_bytes, 2u * 4096);
    digests[1] = 7;
    CHECK(with([&](CommitBatch& batch) { batch.digests = digests; }).ok());
    CHECK((outcomes == Outcomes(2, CommitOutcome::readable)));
    const std::uint32_t first = 0;
    const Acquired leased =
        value_of(core.leases().acquire_entries(made.session, made.space, two, std::span(&first, 1)));
    CHECK_EQUAL(leased.groups[0].digests[1], 7u);
}

TEST(parents_outlive_their_children) {
    // A child that was committed last is the newest, yet goes before its parent.
    Written made;
    const Hashes hashes = chain(1, 3);
    for (std::size_t i = 0; i < 3; ++i) {
        const Hashes hash = chain(1, 1, i);
        const std::vector<Ticket> ticket = made.cache.reserve(made.session, made.space, hash);
        made.cache.write(made.session, made.space, hash, ticket);
        const Hashes parent = i == 0 ? Hashes(kHashBytes) : chain(1, 1, i - 1);
        CHECK(made.cache.commit(made.session, made.space, hash, ticket, 0, parent)[0] == CommitOutcome::readable);
    }
    for (std::size_t left = 2; left > 0; --left) {
        CHECK_EQUAL(made.cache->removals().evict(1), 4096u);
        CHECK_EQUAL(made.cache.count_readable(made.space, chain(1, left)), left);
    }
}

TEST(a_tenant_over_its_quota_loses_its_own_first) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const TenantNumber small = value_of(cache->open_tenant("small", 100 * 4096));
    const TenantNumber large = value_of(cache->open_tenant("large", 400 * 4096));
    const TenantNumber guest = value_of(cache->open_tenant("guest", 0));
    CHECK_EQUAL(cache.put(session, space, chain(1, 300), large), 300u);
    CHECK_EQUAL(cache.put(session, space, chain(2, 50), guest), 50u);
    CHECK_EQUAL(cache.put(session, space, chain(3, 50)), 50u);
    for (std::uint64_t prompt = 10; prompt < 40; ++prompt) {
        CHECK(cache.put(session, space, chain(prompt, 100), small) > 0);
    }
    // There was room for 624 of the small one, until others came.
    CHECK_EQUAL(cache->stats().tenants[small].used_bytes, 624u * 4096);
    CHECK_EQUAL(cache.put(session, space, chain(4, 100), large), 100u);
    CHECK_EQUAL(cache.put(session, space, chain(5, 424), guest), 424u);
    CHECK_EQUAL(cache.count_readable(space, chain(1, 300)) + cache.count_readable(space, chain(4, 100)), 400u);
    CHECK_EQUAL(cache.count_readable(space, chain(2, 50)) + cache.count_readable(space, chain(3, 50)), 100u);
    CHECK_EQUAL(cache.count_readable(space, chain(5, 424)), 424u);
    const CacheStats stats = cache->stats();
    CHECK_EQUAL(stats.tenants[small].used_bytes, 100u * 4096);
    CHECK_EQUAL(stats.tenants[large].used_bytes, 400u * 4096);
    std::uint64_t sum = 0;
    for (const auto& tenant : stats.tenants) {
        sum += tenant.used_bytes;
    }
    CHECK_EQUAL(sum, stats.used_bytes);
    CHECK_EQUAL(stats.used_bytes, kSegmentBytes);
}

TEST(a_commit_may_name_who_pays) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const TenantNumber first = value_of(cache->open_tenant("first", 100 * 4096));
    const TenantNumber second = value_of(cache->open_tenant("second", 100 * 4096));
    const Hashes hashes = chain(1, 10);
    const std::vector<Ticket> tickets = cache.reserve(session, space, hashes, first);
    cache.write(session, space, hashes, tickets);
    CHECK_EQUAL(cache->stats().tenants[first].used_bytes, 10u * 4096);
    std::vector<CommitOutcome> outcomes(tickets.size());
    CommitBatch batch{.space = space, .tickets = tickets, .hashes = hashes, .parents = {}, .digests = {}, .tenant = 9};
    CHECK_EQUAL(cache->commits().commit(session, batch, outcomes).message(), "no tenant has number 9");
    CHECK_EQUAL(cache.count_readable(space, hashes), 0u);
    batch.tenant = second;
    CHECK(cache->commits().commit(session, batch, outcomes).ok());
    CHECK_EQUAL(cache.count_readable(space, hashes), 10u);
    CHECK_EQUAL(cache->stats().tenants[first].used_bytes, 0u);
    CHECK_EQUAL(cache->stats().tenants[second].used_bytes, 10u * 4096);
    // The second tenant loses the blocks as its own, and no tenant is left charged for them.
    for (std::uint64_t prompt = 10; prompt < 30; ++prompt) {
        cache.put(session, space, chain(prompt, 100), second);
        cache.put(session, space, chain(100 + prompt, 100), first);
    }
    CHECK_EQUAL(cache.count_readable(space, hashes), 0u);
    const CacheStats stats = cache->stats();
    CHECK_EQUAL(stats.tenants[0].used_bytes + stats.tenants[first].used_bytes + stats.tenants[second].used_bytes,
                stats.used_bytes);
    CHECK_EQUAL(cache->removals().clear(namespace_of(space)), std::size_t{stats.readable});
    CHECK_EQUAL(cache->stats().tenants[second].used_bytes, 0u);
}

// A chain is never full by chance: an identity has filled it with chosen names, and makes room.
TEST(a_full_chain_of_the_table_keeps_no_neighbours_block_out) {
    SmallCache cache(small_options(2));
    const Space hostile = cache.open(plain_geometry(), 1);
    const Space honest = cache.open(plain_geometry(), 2);
    const SessionId session = cache.session();
    const Hashes old = names_of_one_chain(cache, honest, 3, 1'000'000);
    CHECK_EQUAL(cache.put(session, honest, old), 3u);
    const Hashes chosen = names_of_one_chain(cache, hostile, 1'600, 1);
    CHECK_EQUAL(cache.put(session, hostile, chosen), 1'600u);
    CHECK(cache.count_readable(hostile, chosen) < 180);
    CHECK_EQUAL(cache.count_readable(honest, old), 3u);
    const Hashes later = names_of_one_chain(cache, honest, 20, 2'000'000);
    CHECK_EQUAL(cache.put(session, honest, later), 20u);
    CHECK_EQUAL(cache.count_readable(honest, later), 20u);
}

TEST(a_full_chain_takes_nothing_that_is_in_use_or_of_a_tenant_within_its_quota) {
    SmallCache cache(small_options(2));
    const Space space = cache.open();
    const SessionId session = cache.session();
    const TenantNumber modest = value_of(cache->open_tenant("modest", 400 * 4096));
    const TenantNumber other = value_of(cache->open_tenant("other", 400 * 4096));
    const Hashes names = names_of_one_chain(cache, space, 220, 1);
    const auto part = [&](std::size_t first, std::size_t count) {
        const auto begin = names.begin() + static_cast<std::ptrdiff_t>(first * kHashBytes);
        return Hashes(begin, begin + static_cast<std::ptrdiff_t>(count * kHashBytes));
    };
    CHECK_EQUAL(cache.put(session, space, part(0, 176), modest), 176u);
    CHECK_EQUAL(cache.put(session, space, part(176, 10), other), 0u);
    CHECK_EQUAL(cache.count_readable(space, part(0, 176)), 176u);
    const auto held = cache.take(session, space, part(0, 170));
    CHECK(held);
    CHECK_EQUAL(cache.put(session, space, part(190, 6), modest), 6u);
    CHECK_EQUAL(cache.count_readable(space, part(170, 6)), 0u);
    CHECK(cache.is_right(*held, space, part(0, 170)));
}
