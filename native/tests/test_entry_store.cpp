#include "cache/entry_store.hpp"

#include <random>
#include <set>

#include "cache_fixture.hpp"
#include "index/lookup.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// Entries without sessions and leases: a lease is a number in the word.
struct Store {
    explicit Store(EntryNumber entry_limit = 1000, const std::string& policy = "lru")
        : index(small_index(entry_limit)),
          tenants(
              TenantTable::create(index.view().tenants, value_of(find_policy(policy)), {entry_limit, kSegmentBytes})) {
        SegmentWish wish;
        wish.size_bytes = kSegmentBytes;
        segments.push_back(value_of(Segment::create(wish)));
        Arena arena = value_of(Arena::create({.segment_bytes = kSegmentBytes, .extent_bytes = kExtentBytes}));
        CHECK(arena.add_segment().ok());
        store.emplace(index, segments, namespaces, std::move(tenants), std::move(arena));
        CHECK(store->start().ok());
    }

    Space open(const Geometry& geometry, std::uint8_t name = 1) {
        return make_space(value_of(namespaces.open(fingerprint(name), geometry)), 0);
    }
    EntryNumber reserve(Space space, TenantNumber tenant = 0) {
        Effort effort;
        EntryNumber entry = kNoEntry;
        do {
            entry = store->reserve(space, value_of(store->open_class(space)), tenant, 3, effort);
        } while (entry == kNoEntry && effort.is_unfinished);
        return entry;
    }
    EntryNumber add(Space space, std::uint64_t key, TenantNumber tenant = 0, EntryNumber parent = kNoEntry) {
        const EntryNumber entry = reserve(space, tenant);
        if (entry != kNoEntry) {
            fill_pattern(store->slot_bytes(entry), chain(key, 1), space, 0);
            CHECK(store->publish(entry, read_hash(chain(key, 1).data()), parent, 0).ok());
        }
        return entry;
    }
    EntryNumber find(Space space, std::uint64_t key) {
        return find_entry(index.view(), {read_hash(chain(key, 1).data()), space}).entry;
    }
    std::atomic<std::uint64_t>& word(EntryNumber entry) { return index.view().entries[entry].word; }
    EntryState state(EntryNumber entry) { return EntryWord(word(entry).load()).state(); }

    IndexFile index;
    std::vector<Segment> segments;
    NamespaceTable namespaces{index.view(), reserve_in(index)};
    TenantTable tenants;
    std::optional<EntryStore> store;
};

}  // namespace

// The lock is free between the parts, so that a waiting thread gets it.
TEST(making_room_for_a_large_record_is_cut_into_parts) {
    Store made(8000);
    const Space small = made.open(plain_geometry(1024), 1);
    const Space large = made.open(plain_geometry(1 << 20), 2);
    std::uint64_t key = 0;
    while (made.store->counts().evicted == 0) {
        CHECK(made.add(small, ++key) != kNoEntry);
    }
    const std::uint64_t before = made.store->counts().evicted;
    const ClassNumber size_class = value_of(made.store->open_class(large));
    Effort effort;
    EntryNumber entry = made.store->reserve(large, size_class, 0, 3, effort);
    CHECK(entry == kNoEntry && effort.is_unfinished);
    CHECK_EQUAL(made.store->counts().evicted - before, 512u);
    CHECK_EQUAL(effort.evicted_bytes, 512u * 1024);
    CHECK_EQUAL(made.store->counts().reserved.load(), 0u);
    while (entry == kNoEntry && effort.is_unfinished) {
        entry = made.store->reserve(large, size_class, 0, 3, effort);
    }
    CHECK(entry != kNoEntry && !effort.is_unfinished);
}

TEST(an_entry_lives_from_reservation_to_eviction) {
    Store made;
    const Space space = made.open(plain_geometry(1000));
    const StoreCounts& counts = made.store->counts();
    const EntryNumber entry = made.reserve(space);
    CHECK(made.state(entry) == EntryState::reserved);
    CHECK_EQUAL(counts.reserved.load(), 1u);
    CHECK_EQUAL(counts.used_bytes.load(), 1000u);
    CHECK_EQUAL(made.find(space, 1), kNoEntry);
    CHECK_EQUAL(made.store->slot_bytes(entry).size(), 1000u);
    CHECK(!made.store->remove(entry, Leaving::untrusted));
    CHECK(!made.store->evict_one());

    const std::uint64_t version = made.index.view().header->version_counter;
    CHECK(made.store->publish(entry, read_hash(chain(1, 1).data()), kNoEntry, 0).ok());
    CHECK(made.index.view().header->version_counter > version);
    CHECK_EQUAL(made.find(space, 1), entry);
    CHECK_EQUAL(counts.reserved.load(), 0u);
    CHECK_EQUAL(counts.readable.load(), 1u);
    CHECK(made.store->evict_one());
    CHECK_EQUAL(made.find(space, 1), kNoEntry);
    CHECK(made.state(entry) == EntryState::free);
    CHECK_EQUAL(counts.readable.load(), 0u);
    CHECK_EQUAL(counts.used_bytes.load(), 0u);
    CHECK_EQUAL(counts.evicted.load(), 1u);
    CHECK(!made.store->evict_one());

    const EntryNumber next = made.reserve(space);
    made.store->abort(next);
    CHECK(made.state(next) == EntryState::free);
    CHECK_EQUAL(counts.reserved.load() + counts.used_bytes.load(), 0u);
    CHECK_EQUAL(made.store->arena().stats().live_records, 0u);
}

TEST(what_is_leased_is_hidden_but_kept_until_its_lease_ends) {
    Store made;
    const Space space = made.open(plain_geometry());
    const EntryNumber entry = made.add(space, 1);
    made.word(entry).fetch_add(2);
    CHECK(!made.store->evict_one());
    CHECK(made.store->remove(entry, Leaving::untrusted));
    CHECK(!made.store->remove(entry, Leaving::untrusted));
    CHECK_EQUAL(made.find(space, 1), kNoEntry);
    CHECK(made.state(entry) == EntryState::quarantined);
    CHECK_EQUAL(EntryWord(made.word(entry).load()).leases(), 2u);
    CHECK_EQUAL(made.store->counts().quarantined.load(), 1u);
    CHECK_EQUAL(made.store->counts().used_bytes.load(), 4096u);
    made.word(entry).fetch_sub(1);
    made.store->end_quarantine(entry);
    CHECK(made.state(entry) == EntryState::quarantined);
    CHECK(has_pattern(made.store->slot_bytes(entry), chain(1, 1), space, 0));
    made.word(entry).fetch_sub(1);
    made.store->end_quarantine(entry);
    CHECK(made.state(entry) == EntryState::free);
    made.store->end_quarantine(entry);
    CHECK_EQUAL(made.store->counts().quarantined.load(), 0u);
    CHECK_EQUAL(made.store->counts().used_bytes.load(), 0u);
    const EntryNumber other = made.add(space, 2);
    made.store->end_quarantine(other);
    CHECK(made.state(other) == EntryState::readable);
}

// If slots are short, a state can come before its block, which the store could not foresee.
TEST(with_a_block_of_full_attention_go_those_of_other_groups_that_have_its_name) {
    Store made;
    Geometry geometry = plain_geometry(1000);
    geometry.groups.push_back(geometry.groups[0]);
    geometry.groups[1].record_bytes = 3000;
    const Space first = made.open(geometry);
    const Space second = first + 1;
    for (const std::uint64_t key : {1, 2, 3}) {
        CHECK(made.add(first, key) != kNoEntry);
    }
    CHECK(made.add(second, 1) != kNoEntry);
    const EntryNumber leased = made.add(second, 2);
    CHECK(made.add(second, 4) != kNoEntry);

    CHECK(made.store->evict_one());
    CHECK_EQUAL(made.find(first, 1), kNoEntry);
    CHECK_EQUAL(made.find(second, 1), kNoEntry);
    CHECK_EQUAL(made.store->counts().evicted.load(), 2u);
    CHECK_EQUAL(made.store->counts().used_bytes.load(), 2 * 1000u + 2 * 3000u);

    // A leased entry stays, and an entry that the other group does not have does not stop an eviction.
    made.word(leased).fetch_add(1);
    CHECK(made.store->evict_one());
    CHECK_EQUAL(made.find(first, 2), kNoEntry);
    CHECK_EQUAL(made.find(second, 2), leased);
    CHECK(made.store->evict_one());
    CHECK_EQUAL(made.find(first, 3), kNoEntry);
    CHECK_EQUAL(made.store->counts().readable.load(), 2u);
}

TEST(a_state_that_came_before_its_block_is_worth_as_much_as_one_that_came_behind_it) {
    Store made(1000, "prefix");
    Geometry hybrid = plain_geometry();
    hybrid.groups.push_back(hybrid.groups[0]);
    hybrid.groups[1].rule = BoundaryRule::exact;
    const Space blocks = made.open(hybrid);
    const Space states = make_space(namespace_of(blocks), 1);
    const auto add_pairs = [&](std::uint64_t begin, std::uint64_t end) {
        for (std::uint64_t key = begin; key < end; ++key) {
            made.add(states, key, 0, made.add(blocks, key));
        }
    };
    add_pairs(1, 100);
    made.add(states, 100);
    made.add(blocks, 100);
    made.add(states, 101);  // its block never comes
    add_pairs(102, 200);
    const std::uint64_t before = made.store->counts().evicted.load();
    CHECK(made.store->evict_one());
    CHECK_EQUAL(made.find(states, 101), kNoEntry);
    for (int i = 0; i < 150; ++i) {
        CHECK(made.store->evict_one());
    }
    CHECK_EQUAL(made.find(states, 1), kNoEntry);
    CHECK(made.find(states, 100) != kNoEntry);
    CHECK_EQUAL(made.store->counts().evicted.load() - before, 151u);
}

// As a hybrid model's groups have them, in a pool that is full: any slot is of use for either.
TEST(records_of_nearly_one_size_leave_no_holes) {
    Store made;
    Geometry hybrid = plain_geometry(128'000);
    hybrid.groups.push_back(hybrid.groups[0]);
    hybrid.groups[1].record_bytes = 131'072;
    const Space states = made.open(hybrid);
    const Space blocks = make_space(namespace_of(states), 1);
    std::mt19937_64 random(5);
    for (std::uint64_t key = 1; key <= 400; ++key) {
        CHECK(made.add(random() % 3 == 0 ? blocks : states, key) != kNoEntry);
    }
    CHECK_EQUAL(made.store->counts().readable.load(), kSegmentBytes / 131'072);
    CHECK_EQUAL(made.store->arena().stats().moved_records, 0u);
}

TEST(numbers_run_out_before_memory_does) {
    Store made(10);
    const Space space = made.open(plain_geometry(64));
    for (std::uint64_t key = 0; key < 10; ++key) {
        CHECK(made.add(space, key) < 10);
    }
    const EntryNumber used_again = made.add(space, 10);
    CHECK(used_again < 10);
    CHECK_EQUAL(made.store->counts().evicted.load(), 1u);
    CHECK_EQUAL(made.find(space, 0), kNoEntry);
    for (EntryNumber entry = 0; entry < 10; ++entry) {
        made.word(entry).fetch_add(1);
    }
    CHECK_EQUAL(made.add(space, 11), kNoEntry);
    CHECK_EQUAL(made.store->counts().readable.load(), 10u);
    made.word(4).fetch_sub(1);
    CHECK_EQUAL(made.add(space, 11), 4u);
}

TEST(numbers_of_entries_without_shards_serve_sharded_ones) {
    Store made;
    const Space plain = made.open(plain_geometry(64), 1);
    const Space sharded = made.open(plain_geometry(64, 2), 2);
    std::vector<EntryNumber> entries;
    for (std::uint64_t key = 0; key < 600; ++key) {
        entries.push_back(made.add(plain, key));
    }
    const std::uint64_t before = made.index.segment().held_bytes();
    for (const EntryNumber entry : entries) {
        CHECK(made.store->remove(entry, Leaving::untrusted));
    }
    // Their digests have memory of their own before they are first touched.
    const EntryNumber first = made.reserve(sharded);
    CHECK(first < 600);
    CHECK(made.index.segment().held_bytes() > before);
    const std::uint64_t after = made.index.segment().held_bytes();
    made.index.view().shard_digests[first].digest[1] = 1;
    CHECK_EQUAL(made.index.segment().held_bytes(), after);
}

TEST(what_one_tenant_holds_keeps_nobody_else_from_giving_way) {
    for (const std::string_view policy : policy_names()) {
        Store made(1000, std::string(policy));
        const Space space = made.open(plain_geometry());
        const TenantNumber greedy = value_of(made.store->tenants().open("greedy", 4096));
        for (std::uint64_t key = 0; key < 20; ++key) {
            made.word(made.add(space, key, greedy)).fetch_add(1);
        }
        for (std::uint64_t key = 100; key < 110; ++key) {
            made.add(space, key);
        }
        for (int i = 0; i < 10; ++i) {
            CHECK(made.store->evict_one());
        }
        CHECK(!made.store->evict_one());
        for (std::uint64_t key = 0; key < 20; ++key) {
            CHECK(made.find(space, key) != kNoEntry);
        }
    }
}

TEST(whoever_would_pass_its_quota_makes_the_room) {
    Store made(4000);
    const Space space = made.open(plain_geometry());
    const std::uint64_t room = kSegmentBytes / 4096;
    const TenantNumber bounded = value_of(made.store->tenants().open("bounded", 100 * 4096));
    for (std::uint64_t key = 0; key < 100; ++key) {
        made.add(space, key, bounded);
    }
    for (std::uint64_t key = 1000; key < 1000 + room - 100; ++key) {
        made.add(space, key);
    }
    CHECK_EQUAL(made.store->counts().evicted.load(), 0u);
    for (std::uint64_t key = 100; key < 400; ++key) {
        CHECK(made.add(space, key, bounded) != kNoEntry);
    }
    const auto usage = made.store->tenants().usage();
    CHECK_EQUAL(usage[bounded].used_bytes, 100u * 4096);
    CHECK_EQUAL(usage[0].used_bytes, (room - 100) * 4096);
    CHECK_EQUAL(made.store->counts().used_bytes.load(), kSegmentBytes);
}

// As many entries as slots, or fewer: it is a slot or a number that is short.
TEST(whoever_is_beyond_its_quota_and_has_nothing_to_lose_is_refused) {
    for (const std::string_view policy : policy_names()) {
        for (const EntryNumber entry_limit : {4000u, 900u}) {
            Store made(entry_limit, std::string(policy));
            const Space space = made.open(plain_geometry());
            const std::uint64_t room = std::min<std::uint64_t>(kSegmentBytes / 4096, entry_limit);
            const TenantNumber greedy = value_of(made.store->tenants().open("greedy", 100 * 4096));
            const TenantNumber modest = value_of(made.store->tenants().open("modest", 600 * 4096));
            std::vector<EntryNumber> held;
            for (std::uint64_t key = 0; key < 200; ++key) {
                held.push_back(made.add(space, key, greedy));
                made.word(held.back()).fetch_add(1);
            }
            for (std::uint64_t key = 1000; key < 1600; ++key) {
                made.add(space, key, modest);
            }
            for (std::uint64_t key = 2000; key < 2000 + room - 800; ++key) {
                made.add(space, key);
            }
            for (int i = 0; i < 20; ++i) {
                CHECK_EQUAL(made.reserve(space, greedy), kNoEntry);
            }
            CHECK_EQUAL(made.store->counts().evicted.load(), 0u);
            CHECK_EQUAL(made.store->tenants().usage()[greedy].used_bytes, 200u * 4096);

            // Others find room as before, and so does this one when it has something to lose.
            CHECK(made.add(space, 3000) != kNoEntry);
            made.word(held[7]).fetch_sub(1);
            CHECK(made.add(space, 3001, greedy) != kNoEntry);
            CHECK(made.find(space, 7) == kNoEntry);
            CHECK_EQUAL(made.store->counts().evicted.load(), 2u);
        }
    }
}

TEST(a_full_pool_refuses_and_keeps_its_counts) {
    Store made(4000);
    const Space space = made.open(plain_geometry());
    std::vector<EntryNumber> reserved;
    for (EntryNumber entry = made.reserve(space); entry != kNoEntry; entry = made.reserve(space)) {
        reserved.push_back(entry);
    }
    CHECK_EQUAL(reserved.size(), kSegmentBytes / 4096);
    CHECK_EQUAL(made.store->tenants().usage()[0].used_bytes, kSegmentBytes);
    std::set<std::uint64_t> addresses;
    for (const EntryNumber entry : reserved) {
        CHECK(addresses.insert(made.store->slot_address(entry)).second);
        made.store->abort(entry);
    }
    CHECK_EQUAL(made.store->tenants().usage()[0].used_bytes, 0u);
    CHECK(made.reserve(space) != kNoEntry);
}

TEST(hints_that_name_no_possible_parent_are_not_followed) {
    Store made;
    const Space space = made.open(plain_geometry(), 1);
    const Space other = made.open(plain_geometry(), 2);
    const TenantNumber own = value_of(made.store->tenants().open("own", 1 << 20));
    const EntryNumber stranger = made.add(other, 1);
    const EntryNumber of_other_tenant = made.add(space, 2, own);
    const EntryNumber gone = made.add(space, 3);
    CHECK(made.store->remove(gone, Leaving::untrusted));
    const EntryNumber parent = made.add(space, 4);
    for (const EntryNumber hint : {stranger, of_other_tenant, EntryNumber{999'999}, kNoEntry, parent}) {
        CHECK(made.add(space, 100 + hint, 0, hint) != kNoEntry);
    }
    std::size_t evicted = 0;
    while (made.store->evict_one()) {
        ++evicted;
    }
    CHECK_EQUAL(evicted, 8u);
    CHECK_EQUAL(made.store->counts().used_bytes.load(), 0u);
}

TEST(what_left_is_remembered_with_why_and_what_would_have_kept_it) {
    Store made;
    const Space space = made.open(plain_geometry());
    const StoreCounts& counts = made.store->counts();
    const auto departed = [&](std::uint64_t key) {
        return made.store->find_departed(space, read_hash(chain(key, 1).data())[0]);
    };
    CHECK(!departed(1));
    const EntryNumber first = made.add(space, 1);
    const std::uint64_t bytes = made.store->slot_bytes(first).size();
    made.index.view().entries[first].tiers.store(kInMemory | kWasUsed);
    made.add(space, 2);
    made.add(space, 3);
    CHECK(!departed(1));
    CHECK(made.store->evict_one() && made.store->evict_one());
    CHECK(departed(1)->why == Leaving::evicted && departed(2)->why == Leaving::evicted);
    // All that was evicted since then, and itself.
    CHECK_EQUAL(departed(1)->missing_bytes, 2 * bytes);
    CHECK_EQUAL(departed(2)->missing_bytes, bytes);
    CHECK(departed(1)->seconds_ago < 60);
    CHECK_EQUAL(counts.evicted_unused.load(), 1u);
    std::uint64_t resided = 0;
    for (const auto& bucket : counts.residence) {
        resided += bucket.load();
    }
    CHECK_EQUAL(resided, 2u);
    CHECK(made.store->remove(made.find(space, 3), Leaving::cleared));
    CHECK(departed(3)->why == Leaving::cleared);
    CHECK_EQUAL(counts.evicted.load(), 2u);
}

TEST(when_an_entry_was_stored_fits_three_bytes) {
    CHECK(!StoredAt().seconds_until(5));
    constexpr std::uint32_t kRound = (1U << 24) - 1;
    for (const std::uint32_t second : {0U, 1U, 255U, 65'536U, kRound - 1, kRound, 3'000'000'000U}) {
        for (const std::uint32_t later : {0U, 1U, 300U, 604'800U, kRound - 1}) {
            CHECK_EQUAL(*StoredAt(second).seconds_until(second + later), later);
        }
    }
}

TEST(what_each_namespace_uses_is_counted) {
    Store made;
    const StoreCounts& counts = made.store->counts();
    const Space one = made.open(plain_geometry(1000), 1);
    const Space other = made.open(plain_geometry(5000), 2);
    made.add(one, 1);
    made.add(other, 1);
    const EntryNumber reserved = made.reserve(other);
    CHECK_EQUAL(counts.used_by[namespace_of(one)].load(), 1000u);
    CHECK_EQUAL(counts.used_by[namespace_of(other)].load(), 10000u);
    made.store->abort(reserved);
    CHECK(made.store->evict_one() && made.store->evict_one());
    CHECK_EQUAL(counts.used_by[namespace_of(one)].load() + counts.used_by[namespace_of(other)].load(), 0u);
}

TEST(touches_reach_only_those_that_are_still_there) {
    Store made;
    const Space space = made.open(plain_geometry());
    const TenantNumber own = value_of(made.store->tenants().open("own", 1 << 20));
    const EntryNumber a = made.add(space, 1);
    const EntryNumber b = made.add(space, 2, own);
    const EntryNumber c = made.add(space, 3);
    const EntryNumber gone = made.add(space, 4);
    const EntryNumber reserved = made.reserve(space);
    CHECK(made.store->remove(gone, Leaving::untrusted));
    const std::vector<EntryNumber> touched = {gone, a, b, reserved, a};
    made.store->touch(touched);
    // Now `c` is the oldest of its policy.
    made.index.view().entries[b].recency = 5;
    made.index.view().header->clock = 5;
    CHECK(made.store->evict_one());
    CHECK_EQUAL(made.find(space, 3), kNoEntry);
    CHECK(made.find(space, 1) == a && made.find(space, 2) == b && c != a);
}

TEST(records_of_many_sizes_keep_their_bytes_while_they_move) {
    for (const std::string_view policy : policy_names()) {
        Store made(20000, std::string(policy));
        std::mt19937_64 random(17);
        std::vector<Space> spaces;
        for (const std::uint64_t bytes : {100u, 1000u, 4096u, 5000u, 30000u, 200000u, 1000000u}) {
            spaces.push_back(made.open(plain_geometry(bytes), static_cast<std::uint8_t>(spaces.size() + 1)));
        }
        std::vector<std::pair<Space, std::uint64_t>> keys;
        for (std::uint64_t key = 0; key < 6000; ++key) {
            // The mix of sizes changes every now and then.
            const std::size_t phase = key / 1500;
            const Space space = spaces[(phase * 3 + random() % 3) % spaces.size()];
            CHECK(made.add(space, key) != kNoEntry);
            keys.emplace_back(space, key);
            if (random() % 8 == 0) {
                const auto& [other, old] = keys[random() % keys.size()];
                if (const EntryNumber entry = made.find(other, old); entry != kNoEntry) {
                    CHECK(has_pattern(made.store->slot_bytes(entry), chain(old, 1), other, 0));
                }
            }
        }
        std::set<std::pair<std::uint64_t, std::uint64_t>> places;
        for (const auto& [space, key] : keys) {
            if (const EntryNumber entry = made.find(space, key); entry != kNoEntry) {
                CHECK(has_pattern(made.store->slot_bytes(entry), chain(key, 1), space, 0));
                const std::uint64_t begin = made.store->slot_address(entry);
                places.emplace(begin, begin + made.store->slot_bytes(entry).size());
            }
        }
        std::uint64_t end = 0;
        for (const auto& [begin, place_end] : places) {
            CHECK(begin >= end);
            end = place_end;
        }
        CHECK_EQUAL(places.size(), made.store->counts().readable.load());
        CHECK(made.store->counts().moved_bytes.load() > 0);
        while (made.store->evict_one()) {
        }
        CHECK_EQUAL(made.store->counts().used_bytes.load() + made.store->counts().readable.load(), 0u);
        CHECK_EQUAL(made.store->arena().stats().free_extents, kSegmentBytes / kExtentBytes);
    }
}
