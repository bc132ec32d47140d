#include "cache/cache_state.hpp"

#include <array>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "cache_fixture.hpp"
#include "check.hpp"
#include "hybrid_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// A state without a core.
struct BareState {
    BareState()
        : memory(value_of(CacheMemory::create(options()))),
          state(*memory,
                TenantTable::create(memory->index().view().tenants, find_policy("lru").value(),
                                    {.entry_limit = 100, .capacity_bytes = kSegmentBytes}),
                arena()) {
        CHECK(state.store.start().ok());
        space = make_space(value_of(state.namespaces.open(fingerprint(1), plain_geometry())), 0);
    }

    static CacheOptions options() {
        CacheOptions options = small_options();
        options.is_sparse = true;
        return options;
    }
    static Arena arena() {
        Arena arena = value_of(Arena::create({.segment_bytes = kSegmentBytes, .extent_bytes = kExtentBytes}));
        CHECK(arena.add_extents(kSegmentBytes / kExtentBytes).ok());
        return arena;
    }
    EntryNumber store_one(std::uint64_t key) {
        Effort effort;
        const ClassNumber size_class = value_of(state.store.open_class(space));
        const EntryNumber entry = state.store.reserve(space, size_class, 0, 0, effort);
        CHECK(state.store.publish(entry, read_hash(chain(key, 1).data()), kNoEntry, 0).ok());
        return entry;
    }
    bool is_readable(EntryNumber entry) const { return EntryWord(state.view.entries[entry].word.load()).is_readable(); }

    std::unique_ptr<CacheMemory> memory;
    CacheState state;
    Space space = 0;
};

}  // namespace

TEST(a_space_is_used_if_there_is_such_a_group) {
    const BareState bare;
    CHECK(bare.state.use_space(bare.space));
    CHECK(!bare.state.use_space(make_space(namespace_of(bare.space), 1)));
    CHECK(!bare.state.use_space(make_space(namespace_of(bare.space) + 1, 0)));
}

TEST(what_was_acquired_is_told_to_the_policies_when_it_is_drained) {
    BareState bare;
    const EntryNumber first = bare.store_one(1);
    const EntryNumber second = bare.store_one(2);
    CHECK(bare.state.touches.add(std::array{first}));
    bare.state.drain_touches();
    CHECK(bare.state.store.evict_one());
    CHECK(bare.is_readable(first) && !bare.is_readable(second));
}

namespace {

using Touches = std::vector<std::vector<EntryNumber>>;

Touches drain(TouchBuffer& buffer) {
    Touches touches;
    buffer.drain([&](std::span<const EntryNumber> entries) { touches.emplace_back(entries.begin(), entries.end()); });
    return touches;
}

std::vector<EntryNumber> numbers(std::size_t count, EntryNumber first = 0) {
    std::vector<EntryNumber> entries(count);
    std::iota(entries.begin(), entries.end(), first);
    return entries;
}

}  // namespace

TEST(acquires_come_out_as_they_went_in_and_once) {
    TouchBuffer buffer;
    CHECK(drain(buffer).empty());
    const Touches wanted = {{7}, {1, 2, 3}, {3, 2}};
    for (int round = 0; round < 3; ++round) {
        for (const auto& entries : wanted) {
            CHECK(buffer.add(entries));
        }
        CHECK(drain(buffer) == wanted);
        CHECK(drain(buffer).empty());
    }
}

TEST(what_comes_beyond_the_bound_is_refused_and_the_rest_kept) {
    TouchBuffer buffer;
    const auto some = numbers(1000);
    std::size_t added = 0;
    while (buffer.add(some)) {
        added += some.size();
        CHECK(added <= TouchBuffer::kStripeLimit);
    }
    CHECK(added + some.size() > TouchBuffer::kStripeLimit);
    CHECK_EQUAL(buffer.lost(), some.size());
    CHECK(buffer.is_filling());
    std::size_t drained = 0;
    for (const auto& entries : drain(buffer)) {
        CHECK(entries == some);
        drained += entries.size();
    }
    CHECK_EQUAL(drained, added);
    CHECK(!buffer.is_filling());
    CHECK(buffer.add(some));
}

TEST(what_is_drained_in_parts_comes_out_in_its_order_and_once) {
    TouchBuffer buffer;
    Touches wanted;
    for (EntryNumber i = 0; i < 100; ++i) {
        wanted.push_back(numbers(30, i));
        CHECK(buffer.add(wanted.back()));
    }
    Touches drained;
    const auto note = [&](std::span<const EntryNumber> entries) {
        drained.emplace_back(entries.begin(), entries.end());
    };
    for (std::size_t part = 1; part <= 33; ++part) {
        buffer.drain(note, 90);
        CHECK_EQUAL(drained.size(), part * 3);
        CHECK(buffer.is_filling());  // somebody should go on
    }
    CHECK(buffer.add(numbers(5)));
    wanted.push_back(numbers(5));
    buffer.drain(note, 90);
    CHECK(drained == wanted);
    CHECK(!buffer.is_filling());
    CHECK(drain(buffer).empty());
}

TEST(one_acquire_larger_than_the_bound_is_not_lost) {
    TouchBuffer buffer;
    const auto many = numbers(TouchBuffer::kStripeLimit + 1);
    CHECK(buffer.add(many));
    CHECK(!buffer.add(numbers(1)));
    CHECK(drain(buffer) == Touches{many});
}

TEST(threads_lose_nothing_that_was_accepted) {
    constexpr EntryNumber kThreads = 8;
    constexpr EntryNumber kEach = 5000;
    TouchBuffer buffer;
    std::atomic<std::uint64_t> accepted = 0;
    std::atomic<EntryNumber> done = 0;
    std::vector<std::thread> threads;
    for (EntryNumber thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&, thread] {
            for (EntryNumber i = 0; i < kEach; ++i) {
                accepted += buffer.add(numbers(2, (thread * kEach + i) * 2));
            }
            ++done;
        });
    }
    std::vector<EntryNumber> last(kThreads, 0);
    std::uint64_t drained = 0;
    const auto drain_all = [&] {
        for (const auto& entries : drain(buffer)) {
            CHECK(entries.size() == 2 && entries[1] == entries[0] + 1);
            EntryNumber& before = last[entries[0] / 2 / kEach];
            CHECK(before == 0 || entries[0] > before);  // a thread's own order
            before = entries[0];
            ++drained;
        }
    };
    while (done != kThreads) {
        drain_all();
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    drain_all();
    CHECK_EQUAL(drained, accepted.load());
}

TEST(what_is_left_where_nobody_has_the_lock_is_done_at_once) {
    WriterLock lock;
    int made = 0;
    lock.leave([&] { ++made; });
    CHECK_EQUAL(made, 1);
    CHECK(lock.try_lock());
    lock.unlock();
}

TEST(who_leaves_a_call_never_waits_and_the_lock_s_owner_makes_it) {
    WriterLock lock;
    std::vector<int> made;
    lock.lock();
    std::thread([&] {
        for (int call = 0; call < 1000; ++call) {
            lock.leave([&made, call] { made.push_back(call); });
        }
    }).join();
    CHECK(made.empty());
    lock.unlock();
    CHECK_EQUAL(made.size(), 1000u);
    for (int call = 0; call < 1000; ++call) {
        CHECK_EQUAL(made[static_cast<std::size_t>(call)], call);
    }
}

TEST(the_rest_of_a_call_comes_behind_those_that_wait) {
    WriterLock lock;
    std::vector<int> made;
    lock.lock();
    std::thread([&] {
        lock.leave([&] {
            made.push_back(1);
            lock.leave_rest([&] { made.push_back(3); });
        });
        lock.leave([&] { made.push_back(2); });
    }).join();
    lock.unlock();
    CHECK(made == std::vector<int>({1, 2, 3}));
}

TEST(calls_that_are_left_by_many_are_all_made_and_never_two_at_once) {
    constexpr int kCalls = 20000;
    WriterLock lock;
    std::uint64_t made = 0;  // under the lock
    std::atomic<bool> is_over = false;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 2; ++thread) {
        threads.emplace_back([&] {
            while (!is_over.load()) {
                const std::lock_guard held(lock);
                made += 2;
                made -= 2;
            }
        });
    }
    std::vector<std::thread> leaving;
    for (int thread = 0; thread < 2; ++thread) {
        leaving.emplace_back([&] {
            for (int call = 0; call < kCalls; ++call) {
                lock.leave([&] { ++made; });
            }
        });
    }
    for (std::thread& thread : leaving) {
        thread.join();
    }
    is_over.store(true);
    for (std::thread& thread : threads) {
        thread.join();
    }
    lock.lock();
    lock.unlock();
    CHECK_EQUAL(made, 2u * kCalls);
}

TEST(digests_are_those_of_the_shards_that_were_asked_for) {
    Hybrid model;
    model.put_all(1, 64);
    const std::vector<std::vector<std::uint32_t>> asked = {{}, {0}, {1}, {2}, {2, 0}, {0, 1, 2}};
    for (const std::vector<std::uint32_t>& shards : asked) {
        const Acquired acquired = model.acquire(1, 4, 0, ~0ull, 1, shards);
        model.check_hit(acquired, 1, 0, 64);
        for (std::uint32_t group = 0; group < 4; ++group) {
            const LeasedGroup& leased = acquired.groups[group];
            const std::size_t count = leased.addresses.size();
            const Hashes keys = model.keys(group, 1, leased.first, leased.first + count);
            CHECK_EQUAL(leased.digests.size(), shards.size() * count);
            for (std::size_t i = 0; i < leased.digests.size(); ++i) {
                const std::uint32_t shard = shards[i / count];
                const bool has_shard = shard < model.cache.group(model.space(group)).shards;
                CHECK_EQUAL(leased.digests[i],
                            has_shard ? digest_by_hand(model.cache, model.space(group), leased.addresses[i % count],
                                                       hash_at(keys, i % count), shard)
                                      : kNoDigest);
            }
        }
        CHECK(model.cache->leases().release(model.session, acquired.lease));
    }
    CHECK_EQUAL(model.cache->stats().hits, asked.size());
}

TEST(a_changed_byte_is_a_miss_where_every_use_is_checked) {
    CacheOptions options = small_options();
    options.verify = Verify::always;
    Hybrid model(options);
    model.put_all(1, 128);
    const Acquired before = model.acquire(1, 8);
    model.check_hit(before, 1, 0, 128);
    const std::uint64_t damaged = before.groups[0].addresses[5];
    std::byte& changed = model.cache.record(model.space(0), damaged, 1)[2999];
    changed ^= std::byte{1};
    model.check_hit(model.acquire(1, 8), 1, 0, 64);  // block 5 of the prefix is gone
    CHECK_EQUAL(model.cache->stats().mismatches, 1u);
    CHECK_EQUAL(model.cache.count_readable(model.space(0), chain(1, 8)), 7u);
    CHECK_EQUAL(model.cache->stats().quarantined, 1u);
    changed ^= std::byte{1};
    CHECK(model.cache->leases().release(model.session, before.lease));
    CHECK_EQUAL(model.cache->stats().quarantined, 0u);
    model.put(0, 1, 5, 6);
    model.check_hit(model.acquire(1, 8), 1, 0, 128);

    // Without the wish the cache trusts what it saw written itself.
    SmallCache trusting;
    const Space space = trusting.open();
    const SessionId session = trusting.session();
    CHECK(trusting.put_one(session, space, 1));
    const auto lease = trusting.take(session, space, chain(1, 1));
    trusting.record(space, lease->groups[0].addresses[0])[0] ^= std::byte{1};
    CHECK(value_of(trusting->leases().acquire_entries(session, space, chain(1, 1))).outcome == AcquireOutcome::hit);
}
