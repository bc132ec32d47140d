#include <algorithm>
#include <set>

#include "cache_fixture.hpp"
#include "child_process.hpp"
#include "index/lookup.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::uint64_t kAll = kSegmentBytes / 4096;

// A session that lives as long as this process.
SessionId own_session(SmallCache& cache) {
    const SessionId session = cache.session();
    auto self = ProcessHandle::open(value_of(identify_process(getpid())));
    CHECK(cache->sessions().add_member(session, value_of(std::move(self))).ok());
    return session;
}

EntryNumber entry_with(const IndexView& view, Space space, std::uint64_t key) {
    return find_entry(view, {read_hash(chain(key, 1).data()), space}).entry;
}

// Checks that every slot that no session holds can be reserved, and none twice.
void check_no_slot_lost(SmallCache& cache, Space space, std::size_t held) {
    const SessionId session = cache.session();
    const std::vector<Ticket> tickets = cache.reserve(session, space, chain(~1ull, kAll));
    CHECK_EQUAL(tickets.size() + held, kAll);
    const auto addresses = cache.locate(session, tickets);
    CHECK_EQUAL(std::set<std::uint64_t>(addresses.begin(), addresses.end()).size(), tickets.size());
    CHECK_EQUAL(cache->reservations().abort(session, tickets), tickets.size());
}

void check_same_counts(const CacheStats& before, const CacheStats& after) {
    CHECK_EQUAL(after.readable, before.readable);
    CHECK_EQUAL(after.reserved, before.reserved);
    CHECK_EQUAL(after.quarantined, before.quarantined);
    CHECK_EQUAL(after.used_bytes, before.used_bytes);
    CHECK_EQUAL(after.leases, before.leases);
    CHECK_EQUAL(after.sessions, before.sessions);
    CHECK_EQUAL(after.namespaces, before.namespaces);
    CHECK_EQUAL(after.tenants.size(), before.tenants.size());
    for (std::size_t i = 0; i < after.tenants.size(); ++i) {
        CHECK_EQUAL(after.tenants[i].name, before.tenants[i].name);
        CHECK_EQUAL(after.tenants[i].quota_bytes, before.tenants[i].quota_bytes);
        CHECK_EQUAL(after.tenants[i].used_bytes, before.tenants[i].used_bytes);
    }
}

}  // namespace

TEST(what_was_readable_is_readable_with_the_right_bytes) {
    for (const std::string_view policy : policy_names()) {
        SmallCache cache(small_options(2, std::string(policy)));
        Geometry geometry = hybrid_geometry();
        geometry.groups[0].record_bytes = 9'900;  // in slots as large as those of the states
        const Space hybrid = cache.open(geometry, 1);
        const Space plain = cache.open(plain_geometry(5000), 2);
        const SessionId session = own_session(cache);
        const TenantNumber tenant = value_of(cache->open_tenant("tenant", 3 << 20));
        for (std::uint64_t prompt = 0; prompt < 60; ++prompt) {
            for (std::uint32_t group = 0; group < 5; ++group) {
                CHECK_EQUAL(cache.put(session, hybrid + group, chain(prompt, 4), prompt % 2 ? tenant : TenantNumber{0}),
                            4u);
            }
            CHECK_EQUAL(cache.put(session, plain, chain(prompt, 9)), 9u);
        }
        CHECK(cache->stats().evicted > 0);
        std::vector<std::pair<Space, Hashes>> readable;
        for (std::uint64_t prompt = 0; prompt < 60; ++prompt) {
            for (std::size_t i = 0; i < 9; ++i) {
                for (const Space space : {hybrid, hybrid + 1, hybrid + 2, hybrid + 3, hybrid + 4, plain}) {
                    if (cache.count_readable(space, chain(prompt, 1, i)) == 1) {
                        readable.emplace_back(space, chain(prompt, 1, i));
                    }
                }
            }
        }
        const CacheStats before = cache->stats();
        CHECK_EQUAL(before.readable, readable.size());
        for (int times = 0; times < 2; ++times) {
            cache.restart();
            CHECK_EQUAL(cache->adoption().readable, readable.size());
            CHECK_EQUAL(cache->adoption().dropped, 0u);
            check_same_counts(before, cache->stats());
            CHECK(cache->sessions().reopen(session));
            for (const auto& [space, hash] : readable) {
                const auto lease = cache.take(session, space, hash);
                CHECK(lease && cache->leases().release(session, lease->lease));
            }
            CHECK_EQUAL(cache->stats().mismatches, 0u);
        }
        cache->removals().evict(~0ull);
        CHECK_EQUAL(cache->stats().used_bytes, 0u);
    }
}

TEST(a_cache_that_had_grown_in_part_is_taken_over_and_grows_on) {
    CacheOptions options = small_options(3);
    options.step_bytes = kSegmentBytes / 2;
    SmallCache cache(options, Growth::first_step);
    const Space space = cache.open();
    PopulateProgress progress;
    CHECK(value_of(cache->growth().grow(progress)));
    CHECK(value_of(cache->growth().grow(progress)));
    const std::size_t half = kAll + kAll / 2;
    CHECK_EQUAL(cache.put(cache.session(), space, chain(1, half)), half);
    cache.restart();
    CHECK_EQUAL(cache->adoption().readable, half);
    CHECK_EQUAL(cache->memory().ready_bytes(), kSegmentBytes * 3 / 2);
    CHECK_EQUAL(cache->memory().capacity_bytes(), 3 * kSegmentBytes);
    const SessionId session = cache.session();
    CHECK(value_of(cache->growth().grow(progress)));
    CHECK_EQUAL(cache.put(session, space, chain(2, kAll / 2)), kAll / 2);
    CHECK(cache->growth().grow_fully(progress).ok());
    CHECK_EQUAL(cache.put(session, space, chain(3, kAll)), kAll);
    CHECK_EQUAL(cache->stats().evicted, 0u);
    CHECK_EQUAL(cache.count_readable(space, chain(1, half)), half);
}

TEST(memory_that_cannot_be_ready_is_refused) {
    for (const std::uint64_t wrong : {std::uint64_t{1}, kSegmentBytes + kExtentBytes, std::uint64_t{1} << 60}) {
        SmallCache cache;
        const Status status = cache.try_restart([&](const IndexView& view) { view.header->ready_bytes.store(wrong); });
        CHECK(status.code() == Code::invalid);
    }
}

TEST(segments_of_another_pool_or_in_another_order_are_refused) {
    SmallCache cache(small_options(2));
    SmallCache stranger(small_options(2));
    const auto refuses = [&](auto change) {
        CacheFiles files = cache.duplicate_files();
        change(files.segments);
        return CacheCore::adopt(std::move(files), small_options(2)).fault().code() == Code::invalid;
    };
    CHECK(refuses([](auto& segments) { std::swap(segments[0], segments[1]); }));
    CHECK(refuses([](auto& segments) { segments[1] = duplicate(segments[0].number()); }));
    CHECK(refuses([&](auto& segments) { segments = std::move(stranger.duplicate_files().segments); }));
    CHECK(refuses([](auto& segments) { segments.pop_back(); }));
    cache.restart();
}

TEST(memory_is_adopted_by_successors_of_its_domain_alone) {
    CacheOptions options = small_options();
    options.owner = {.domain = "red", .boot_id = 7, .users = std::vector<std::uint32_t>{1, 2}};
    SmallCache cache(options);
    const Space space = cache.open();
    CHECK_EQUAL(cache.put(cache.session(), space, chain(1, 10)), 10u);
    for (const std::uint32_t user : {2u, 1u, 2u}) {
        cache->memory().note_user(user);
    }
    const auto try_as = [&](const CacheOwner& owner, std::uint64_t former_boot_id = 0) {
        CacheOptions others = options;
        others.owner = owner;
        others.former_boot_id = former_boot_id;
        const auto found = CacheCore::adopt(cache.duplicate_files(), others);
        CHECK(found.ok() || found.fault().code() == Code::invalid);
        return found.ok() ? std::string() : found.fault().message();
    };
    using Users = std::vector<std::uint32_t>;
    CHECK_EQUAL(try_as({.domain = "blue"}), "the memory is another domain's");
    CHECK_EQUAL(try_as({.domain = ""}), "the memory is another domain's");
    CHECK_EQUAL(try_as({.domain = "red", .users = Users{2, 3}}), "user 1 had the memory, and may not use the domain");
    CHECK_EQUAL(try_as({.domain = "red", .users = Users{}}), "user 2 had the memory, and may not use the domain");
    CHECK_EQUAL(try_as({.domain = "red"}, 8), "the memory is of another server than was said");
    CHECK_EQUAL(try_as({.domain = "red", .boot_id = 9, .users = Users{1, 2, 3}}, 7), "");
    CHECK_EQUAL(try_as({.domain = "red"}, 7), "the memory is of another server than was said");  // its boot id is new
    cache.restart();
    CHECK_EQUAL(cache->adoption().readable, 10u);
    // A user who had the memory before the last owner still has it.
    CHECK_EQUAL(try_as({.domain = "red", .users = Users{2}}), "user 1 had the memory, and may not use the domain");
}

TEST(memory_that_more_users_had_than_are_noted_is_for_domains_of_everybody) {
    SmallCache cache;
    std::vector<std::uint32_t> users;
    for (std::uint32_t user = 0; user <= kUserLimit; ++user) {
        cache->memory().note_user(user);
        users.push_back(user);
    }
    CacheOptions options = small_options();
    options.owner.users = users;
    CHECK_EQUAL(CacheCore::adopt(cache.duplicate_files(), options).fault().message(),
                "more than 512 users had the memory");
    CHECK(CacheCore::adopt(cache.duplicate_files(), small_options()).ok());
    CacheOptions long_name = small_options();
    long_name.owner.domain = std::string(136, 'a');
    PopulateProgress progress;
    CHECK(CacheCore::create(long_name, progress).fault().code() == Code::invalid);
}

TEST(a_lock_of_another_memory_says_nothing) {
    SmallCache cache;
    CacheFiles files = cache.duplicate_files();
    files.lock = value_of(make_lock_file());
    CHECK_EQUAL(CacheCore::adopt(std::move(files), small_options()).fault().message(),
                "the lock is not the index's own");
}

TEST(living_sessions_keep_what_they_hold_and_dead_ones_lose_it) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId living = own_session(cache);
    const SessionId dead = cache.session();
    {
        ChildProcess child([](const Line&) { return 0; });
        child.wait_zombie();
        auto handle = ProcessHandle::open(value_of(identify_process(child.pid())));
        CHECK(cache->sessions().add_member(dead, value_of(std::move(handle))).ok());
    }
    CHECK_EQUAL(cache.put(living, space, chain(1, 200)), 200u);
    const auto lease = cache.take(living, space, chain(1, 200));
    const auto lost = cache.take(dead, space, chain(1, 3));
    CHECK_EQUAL(cache->removals().invalidate(space, chain(1, 2)), 2u);  // leased: in quarantine
    const std::vector<Ticket> tickets = cache.reserve(living, space, chain(5, 4));
    const std::vector<Ticket> lost_tickets = cache.reserve(dead, space, chain(6, 4));
    const auto addresses = cache.locate(living, tickets);
    cache.write(living, space, chain(5, 2), std::span(tickets).first(2));
    const std::uint64_t held = cache->sessions().held_bytes(living);
    const CacheStats before = cache->stats();
    cache.restart();
    check_same_counts(before, cache->stats());
    CHECK_EQUAL(cache->adoption().reserved, 8u);
    CHECK_EQUAL(cache->sessions().held_bytes(living), held);

    // The dead session's slots are not free before its engine is back, and before the cache was asked for ended
    // sessions.
    CHECK(cache.reserve(living, space, chain(7, 1)).empty());
    CHECK_EQUAL(cache->reclaim_ended(), 1u);
    CHECK(!cache->sessions().is_known(dead));
    CHECK_EQUAL(cache->reservations().abort(dead, lost_tickets), 0u);
    CHECK(!cache->leases().release(dead, lost->lease));
    const SessionId other = cache.session();
    for (std::uint64_t prompt = 20; prompt < 30; ++prompt) {
        CHECK(cache.put(other, space, chain(prompt, 300)) > 0);
    }
    CHECK(cache.is_right(*lease, space, chain(1, 200)));
    check_no_slot_lost(cache, space, 204);

    CHECK(cache->sessions().reopen(living));
    CHECK(cache.locate(living, tickets) == addresses);
    cache.write(living, space, chain(5, 4), tickets);
    CHECK((cache.commit(living, space, chain(5, 3), std::span(tickets).first(3)) ==
           std::vector(3, CommitOutcome::readable)));
    CHECK_EQUAL(cache->reservations().abort(living, std::span(tickets).subspan(3)), 1u);
    CHECK(cache.take(other, space, chain(5, 3)).has_value());
    CHECK(cache->leases().release(living, lease->lease));
    CHECK(!cache->leases().release(living, lease->lease));
    CHECK_EQUAL(cache->sessions().held_bytes(living), 0u);
    CHECK_EQUAL(cache->stats().quarantined, 0u);
}

TEST(shards_that_were_committed_before_need_not_be_again) {
    SmallCache cache;
    const Space space = cache.open(plain_geometry(2000, 2));
    const SessionId session = own_session(cache);
    const std::vector<Ticket> tickets = cache.reserve(session, space, chain(1, 1));
    cache.write(session, space, chain(1, 1), tickets);
    CHECK(cache.commit(session, space, chain(1, 1), tickets, 1)[0] == CommitOutcome::incomplete);
    cache.restart();
    CHECK(cache->sessions().reopen(session));
    CHECK(cache.commit(session, space, chain(1, 1), tickets, 0)[0] == CommitOutcome::readable);
    cache.restart();
    CHECK(cache->sessions().reopen(session));
    CHECK(cache.is_served(session, space, 1));
}

TEST(whatever_an_entry_was_at_the_death_no_slot_is_lost) {
    struct Case {
        const char* name;
        void (*change)(const IndexView& view, EntryNumber entry);
        bool is_kept;
    };
    const auto set = [](const IndexView& view, EntryNumber entry, EntryState state) {
        std::atomic<std::uint64_t>& word = view.entries[entry].word;
        word = EntryWord(word.load()).with_state(state).bits();
    };
    static const auto set_state = set;
    const std::vector<Case> cases = {
        {"untouched", [](const IndexView&, EntryNumber) {}, true},
        {"moving", [](const IndexView& view, EntryNumber entry) { set_state(view, entry, EntryState::moving); }, true},
        {"pinned by nobody's lease", [](const IndexView& view, EntryNumber entry) { view.entries[entry].word += 9; },
         true},
        {"freed", [](const IndexView& view, EntryNumber entry) { set_state(view, entry, EntryState::free); }, false},
        {"quarantined, its leases over",
         [](const IndexView& view, EntryNumber entry) { set_state(view, entry, EntryState::quarantined); }, false},
        {"reserved by nobody",
         [](const IndexView& view, EntryNumber entry) {
             set_state(view, entry, EntryState::reserved);
             view.entries[entry].recency = Reservation{999, 0}.bits();
         },
         false},
        {"of no state",
         [](const IndexView& view, EntryNumber entry) { set_state(view, entry, static_cast<EntryState>(13)); }, false},
        {"of no namespace", [](const IndexView& view, EntryNumber entry) { view.entries[entry].space = 77 << 16; },
         false},
        {"of no group", [](const IndexView& view, EntryNumber entry) { view.entries[entry].space += 1; }, false},
        {"in no slot", [](const IndexView& view, EntryNumber entry) { view.entries[entry].slot = ~0ull; }, false},
        {"beyond its span", [](const IndexView& view, EntryNumber entry) { view.entries[entry].slot += 16; }, false},
        {"of an unknown tenant", [](const IndexView& view, EntryNumber entry) { view.entries[entry].tenant = 50; },
         true},
        {"child of nobody", [](const IndexView& view, EntryNumber entry) { view.entries[entry].parent = 123456; },
         true},
        {"its own parent", [](const IndexView& view, EntryNumber entry) { view.entries[entry].parent = entry; }, true},
        {"lost by its bucket",
         [](const IndexView& view, EntryNumber) {
             for (std::uint32_t i = 0; i < view.header->bucket_count; ++i) {
                 view.buckets[i].low_tags = 0;
                 view.buckets[i].overflow = i;
                 ++view.buckets[i].version;
             }
         },
         true},
    };
    for (const Case& made_up : cases) {
        SmallCache cache;
        const Space space = cache.open();
        const SessionId session = own_session(cache);
        CHECK_EQUAL(cache.put(session, space, chain(0, 40)), 40u);
        CHECK(cache.put_one(session, space, 1));
        cache.restart([&](const IndexView& view) { made_up.change(view, entry_with(view, space, 1)); });
        CHECK(cache->sessions().reopen(session));
        CHECK_EQUAL(cache->stats().readable, made_up.is_kept ? 41u : 40u);
        CHECK_EQUAL(cache.is_served(session, space, 1), made_up.is_kept);
        CHECK_EQUAL(cache.count_readable(space, chain(0, 41)), 40u);
        CHECK_EQUAL(cache->stats().used_bytes, cache->stats().readable * 4096);
        CHECK(cache.put_one(session, space, 2) && cache.put_one(session, space, 1));
        check_no_slot_lost(cache, space, 0);
        CHECK_EQUAL(cache->stats().used_bytes, 0u);
    }
}

TEST(a_leased_entry_in_quarantine_stays_until_its_lease_ends) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = own_session(cache);
    CHECK_EQUAL(cache.put(session, space, chain(1, 2)), 2u);
    const auto lease = cache.take(session, space, chain(1, 2));
    cache.restart([&](const IndexView& view) {
        std::atomic<std::uint64_t>& word = view.entries[entry_with(view, space, 1)].word;
        word = EntryWord(word.load()).with_state(EntryState::quarantined).with_leases(7).bits();
    });
    CHECK_EQUAL(cache->stats().quarantined, 1u);
    CHECK_EQUAL(cache.count_readable(space, chain(1, 2)), 1u);
    check_no_slot_lost(cache, space, 2);
    CHECK(cache.is_right(*lease, space, chain(1, 2)));
    CHECK(cache->leases().release(session, lease->lease));
    check_no_slot_lost(cache, space, 0);
}

TEST(of_two_entries_with_one_name_or_one_slot_one_remains) {
    for (const bool is_slot : {false, true}) {
        for (const bool is_leased : {false, true}) {
            SmallCache cache;
            const Space space = cache.open();
            const SessionId session = own_session(cache);
            CHECK(cache.put_one(session, space, 1) && cache.put_one(session, space, 2));
            std::optional<Acquired> lease;
            if (is_leased) {
                Hashes both = chain(1, 1);
                const Hashes second = chain(2, 1);
                both.insert(both.end(), second.begin(), second.end());
                lease = cache.take(session, space, both);
            }
            cache.restart([&](const IndexView& view) {
                Entry& first = view.entries[entry_with(view, space, 1)];
                Entry& second = view.entries[entry_with(view, space, 2)];
                if (is_slot) {
                    second.slot = first.slot.load();
                }
                for (std::size_t i = 0; i < 4; ++i) {
                    second.hash[i] = first.hash[i].load();
                }
            });
            CHECK(cache->sessions().reopen(session));
            CHECK_EQUAL(cache->adoption().dropped, 1u);
            CHECK_EQUAL(cache->stats().readable, 1u);
            CHECK(!cache.has(space, 2));
            CHECK(cache.is_served(session, space, 1));
            // A lease on an entry that could not be kept is over; one on an entry without a name is not.
            CHECK_EQUAL(cache->stats().leases, is_leased && !is_slot ? 1u : 0u);
            CHECK_EQUAL(cache->stats().quarantined, is_leased && !is_slot ? 1u : 0u);
            CHECK_EQUAL(lease && cache->leases().release(session, lease->lease), is_leased && !is_slot);
            CHECK_EQUAL(cache->sessions().held_bytes(session), 0u);
            check_no_slot_lost(cache, space, 0);
        }
    }
}

TEST(adopted_records_are_checked_at_their_first_use) {
    SmallCache cache;
    const Space space = cache.open(plain_geometry(1000, 2));
    const SessionId session = own_session(cache);
    CHECK_EQUAL(cache.put(session, space, chain(1, 3)), 3u);
    const auto lease = cache.take(session, space, chain(1, 3));
    CHECK(cache->leases().release(session, lease->lease));
    cache.restart();
    CHECK(cache->sessions().reopen(session));
    cache.record(space, lease->groups[0].addresses[1], 1)[999] ^= std::byte{4};
    CHECK(cache.take(session, space, chain(1, 1)).has_value());
    CHECK(!cache.take(session, space, chain(1, 3)));
    CHECK_EQUAL(cache->stats().mismatches, 1u);
    CHECK_EQUAL(cache.count_readable(space, chain(1, 3)), 2u);
    CHECK_EQUAL(cache->stats().used_bytes, 2u * 2000);
    // Not again: what has been checked is believed.
    cache.record(space, lease->groups[0].addresses[0])[0] ^= std::byte{4};
    CHECK(value_of(cache->leases().acquire_entries(session, space, chain(1, 1))).outcome == AcquireOutcome::hit);
    cache.record(space, lease->groups[0].addresses[0])[0] ^= std::byte{4};
    // The next successor checks it again.
    CHECK_EQUAL(cache.put(session, space, chain(2, 1)), 1u);
    cache.restart();
    CHECK(cache->sessions().reopen(session));
    cache.record(space, lease->groups[0].addresses[0])[0] ^= std::byte{4};
    CHECK(!cache.take(session, space, chain(1, 1)));
}

TEST(the_order_of_going_is_that_of_use_and_hints_in_a_circle_do_no_harm) {
    for (const std::string_view policy : policy_names()) {
        SmallCache cache(small_options(1, std::string(policy)));
        const Space space = cache.open();
        const SessionId session = own_session(cache);
        for (std::uint64_t key = 0; key < 30; ++key) {
            CHECK(cache.put_one(session, space, key));
        }
        for (std::uint64_t key = 0; key < 10; ++key) {
            CHECK(cache.is_served(session, space, key));
        }
        cache.restart([&](const IndexView& view) {
            for (std::uint64_t key = 10; key < 13; ++key) {
                view.entries[entry_with(view, space, key)].parent = entry_with(view, space, key == 12 ? 10 : key + 1);
            }
        });
        CHECK_EQUAL(cache->removals().evict(20 * 4096), 20u * 4096);
        std::size_t used = 0;
        for (std::uint64_t key = 0; key < 10; ++key) {
            used += cache.has(space, key);
        }
        if (policy == "lru") {
            CHECK_EQUAL(used, 10u);
        }
        cache->removals().evict(~0ull);
        CHECK_EQUAL(cache->stats().used_bytes, 0u);
    }
}

TEST(blocks_of_tenants_that_are_none_any_more_are_nobodys) {
    for (const std::string_view policy : policy_names()) {
        SmallCache cache(small_options(1, std::string(policy)));
        const Space space = cache.open();
        const SessionId session = own_session(cache);
        const TenantNumber gone = value_of(cache->open_tenant("gone", 1 << 20));
        const TenantNumber kept = value_of(cache->open_tenant("kept", 0));
        CHECK_EQUAL(cache.put(session, space, chain(1, 5), gone), 5u);
        CHECK_EQUAL(cache.put(session, space, chain(2, 7), kept), 7u);
        const std::vector<Ticket> reserved = cache.reserve(session, space, chain(3, 2), gone);
        cache.successors_options().tenants = {{"new", 1 << 20}, {"kept", 2 << 20}};
        cache.restart();

        const auto tenants = cache->stats().tenants;
        CHECK_EQUAL(tenants.size(), 3u);
        CHECK_EQUAL(tenants[0].used_bytes, 7u * 4096);
        CHECK_EQUAL(tenants[gone].name, "new");
        CHECK_EQUAL(tenants[gone].used_bytes, 0u);
        CHECK_EQUAL(tenants[kept].quota_bytes, 2u << 20);
        CHECK_EQUAL(tenants[kept].used_bytes, 7u * 4096);
        CHECK_EQUAL(cache.count_readable(space, chain(1, 5)) + cache.count_readable(space, chain(2, 7)), 12u);
        CHECK_EQUAL(cache->reservations().abort(session, reserved), 2u);
        while (cache->removals().evict(4096) != 0) {
        }
        for (const auto& tenant : cache->stats().tenants) {
            CHECK_EQUAL(tenant.used_bytes, 0u);
        }
    }
}

TEST(a_successor_with_as_many_tenants_of_other_names_has_them_all) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = own_session(cache);
    std::vector<TenantTerms> others;
    for (std::uint64_t i = 1; i < kTenantLimit; ++i) {
        const TenantNumber tenant = value_of(cache->open_tenant("old " + std::to_string(i), i << 12));
        CHECK(cache.put_one(session, space, i, tenant));
        others.push_back({"new " + std::to_string(i), i % 2 << 12});
    }
    cache.successors_options().tenants = others;
    cache.restart();
    CHECK_EQUAL(cache->stats().tenants.size(), kTenantLimit);
    CHECK_EQUAL(cache->stats().tenants[0].used_bytes, (kTenantLimit - 1) * std::uint64_t{4096});
    CHECK_EQUAL(cache->stats().tenants[1].name, "new 1");

    cache.successors_options().tenants->push_back({"one more", 0});
    CHECK_EQUAL(cache.try_restart([](const IndexView&) {}).message(), "there are 64 tenants, more are not served");
}

TEST(what_the_table_has_no_place_for_is_dropped_and_the_rest_adopted) {
    constexpr EntryNumber kForged = 40;
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = own_session(cache);
    CHECK_EQUAL(cache.put(session, space, chain(1, 100)), 100u);
    cache.restart([&](const IndexView& view) {
        // Keys of one chain and one tag: hashes are like that only if an attacker chose them.
        std::uint64_t number = 0;
        for (EntryNumber entry = 0; entry < kForged; ++number) {
            const Key key{{mix(number), mix(number + 1), 0, 0}, space};
            const std::uint64_t mixed = mix_key(key, view.header->seed);
            if (mixed % 64 == 3 && tag_of(mixed) == 200) {
                for (std::size_t i = 0; i < key.hash.size(); ++i) {
                    view.entries[entry].hash[i] = key.hash[i];
                }
                ++entry;
            }
        }
    });
    const AdoptionReport report = cache->adoption();
    CHECK_EQUAL(report.readable + report.dropped, 100u);
    CHECK(report.dropped > 0 && report.dropped < kForged);
    CHECK_EQUAL(cache.count_readable(space, chain(1, 60, kForged)), 60u);
    CHECK_EQUAL(cache->stats().used_bytes, report.readable * 4096);
}

TEST(identities_without_blocks_make_place_for_others_at_adoption) {
    SmallCache cache;
    const SessionId session = own_session(cache);
    const auto open = [&](std::uint32_t name) {
        Fingerprint bytes{};
        std::memcpy(bytes.data(), &name, sizeof(name));
        return cache->namespaces().open(bytes, plain_geometry());
    };
    const Space kept = cache.open(plain_geometry(), 200);
    for (std::uint32_t name = 1; name < kNamespaceLimit; ++name) {
        CHECK_EQUAL(value_of(open(name)), name);
    }
    CHECK_EQUAL(cache.put(session, kept, chain(1, 3)), 3u);
    CHECK(!open(kNamespaceLimit).ok());
    cache.restart();

    CHECK_EQUAL(cache->stats().namespaces, 1u);
    CHECK_EQUAL(cache.count_readable(kept, chain(1, 3)), 3u);
    CHECK_EQUAL(cache->namespaces().shards_of(make_space(7, 0)), 0u);
    std::set<std::uint32_t> numbers;
    for (std::uint32_t name = 10'000; name < 10'000 + kNamespaceLimit - 1; ++name) {
        numbers.insert(value_of(open(name)));
    }
    CHECK_EQUAL(numbers.size(), kNamespaceLimit - 1);
    CHECK(!numbers.contains(namespace_of(kept)));
    CHECK_EQUAL(value_of(open(10'000)), *numbers.begin());
    CHECK(!open(77).ok());
    const Space reused = make_space(*numbers.begin(), 0);
    cache.open(plain_geometry(), 200);
    cache.restart();
    CHECK_EQUAL(cache.count_readable(kept, chain(1, 3)), 3u);
    CHECK_EQUAL(cache->namespaces().shards_of(reused), 0u);
}
