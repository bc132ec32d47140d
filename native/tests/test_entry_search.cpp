// Searches of a cache's entries, as operators make them.
#include <atomic>
#include <map>
#include <set>
#include <thread>

#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

Hashes hash_of(const EntryFacts& facts) {
    Hashes hash(kHashBytes);
    std::memcpy(hash.data(), facts.hash.data(), hash.size());
    return hash;
}

EntrySurvey survey(SmallCache& cache, std::span<const std::uint8_t> prefix, std::size_t limit = 100) {
    return value_of(cache->search().survey(prefix, limit));
}

}  // namespace

TEST(entries_are_found_by_the_beginnings_of_their_names) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const Hashes blocks = chain(1, 200);
    CHECK_EQUAL(cache.put(session, space, blocks), 200u);
    const Hashes wanted(blocks.begin() + 7 * kHashBytes, blocks.begin() + 8 * kHashBytes);
    for (const std::size_t length : {8u, 9u, 31u, 32u}) {
        const EntrySurvey found = survey(cache, std::span(wanted).first(length));
        CHECK_EQUAL(found.matches, 1u);
        CHECK_EQUAL(found.entries.size(), 1u);
        CHECK(hash_of(found.entries[0]) == wanted);
        CHECK_EQUAL(found.entries[0].space, space);
    }
    std::size_t alike = 0;
    for (std::size_t i = 0; i < 200; ++i) {
        alike += blocks[i * kHashBytes] == wanted[0] ? 1 : 0;
    }
    CHECK_EQUAL(survey(cache, std::span(wanted).first(1)).matches, alike);
    CHECK_EQUAL(survey(cache, {}).matches, 200u);
    CHECK_EQUAL(survey(cache, {}, 3).entries.size(), 3u);
    CHECK_EQUAL(survey(cache, {}, 3).matches, 200u);
    Hashes other = wanted;
    other.back() ^= 1;
    CHECK_EQUAL(survey(cache, other).matches, 0u);
    other.push_back(0);
    CHECK(!cache->search().survey(other, 1).ok());
}

TEST(what_is_told_of_an_entry_is_so) {
    SmallCache cache;
    const Space first = cache.open();
    const Space second = cache.open(plain_geometry(512), 2);
    const SessionId session = cache.session();
    const TenantNumber tenant = value_of(cache->open_tenant("own", 1 << 20));
    CHECK_EQUAL(cache.put(session, first, chain(1, 1)), 1u);
    CHECK_EQUAL(cache.put(session, second, chain(1, 1), tenant), 1u);
    const std::optional<Acquired> held = cache.take(session, second, chain(1, 1));
    const EntrySurvey found = survey(cache, chain(1, 1));
    CHECK_EQUAL(found.matches, 2u);
    for (const EntryFacts& facts : found.entries) {
        const bool is_second = facts.space == second;
        CHECK(is_second || facts.space == first);
        CHECK_EQUAL(facts.leases, is_second ? 1u : 0u);
        CHECK_EQUAL(facts.was_used, is_second);
        CHECK_EQUAL(facts.tenant, is_second ? tenant : 0);
        CHECK(facts.stored_s.has_value());
    }
    CHECK(held && cache->leases().release(session, held->lease));
}

TEST(what_is_not_readable_is_not_there) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const Hashes blocks = chain(1, 4);
    const std::vector<Ticket> tickets = cache.reserve(session, space, blocks);
    CHECK_EQUAL(survey(cache, {}).matches, 0u);
    cache.write(session, space, blocks, tickets);
    cache.commit(session, space, blocks, tickets);
    CHECK_EQUAL(survey(cache, {}).matches, 4u);
    const std::optional<Acquired> held = cache.take(session, space, chain(1, 1));
    CHECK_EQUAL(cache->removals().invalidate(space, chain(1, 2)),
                2u);  // the first stays in quarantine for as long as it is held
    CHECK_EQUAL(survey(cache, {}).matches, 2u);
    CHECK(held && cache->leases().release(session, held->lease));
}

TEST(entries_that_come_and_go_meanwhile_are_whole_or_not_there) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    std::atomic<bool> is_over = false;
    std::thread writer([&] {
        for (std::uint64_t prompt = 0; prompt < 400; ++prompt) {
            cache.put(session, space, chain(prompt % 40, 50));
            cache->removals().invalidate(space, chain((prompt + 20) % 40, 50));
        }
        is_over = true;
    });
    std::set<Hashes> known;
    for (std::uint64_t prompt = 0; prompt < 40; ++prompt) {
        const Hashes blocks = chain(prompt, 50);
        for (std::size_t i = 0; i < 50; ++i) {
            const auto hash = hash_at(blocks, i);
            known.emplace(hash.begin(), hash.end());
        }
    }
    while (!is_over) {
        for (const EntryFacts& facts : survey(cache, {}, 5000).entries) {
            CHECK(known.contains(hash_of(facts)));
            CHECK_EQUAL(facts.space, space);
        }
    }
    writer.join();
}

namespace {

struct Listed {
    std::multiset<Hashes> hashes;
    std::map<Hashes, Hashes> parents;
    std::set<std::uint64_t> groups;
    std::size_t parts = 0;
};

Hashes bytes_of(const HashWords& words) {
    Hashes hash(kHashBytes);
    std::memcpy(hash.data(), words.data(), hash.size());
    return hash;
}

Listed list_all(SmallCache& cache, std::uint32_t name_space, std::size_t limit) {
    Listed listed;
    EntryNumber next = 0;
    do {
        const EntryListing part = cache->search().list(name_space, next, limit);
        CHECK(part.hashes.size() <= limit);
        for (std::size_t i = 0; i < part.hashes.size(); ++i) {
            listed.hashes.insert(bytes_of(part.hashes[i]));
            listed.parents[bytes_of(part.hashes[i])] = bytes_of(part.parents[i]);
            listed.groups.insert(part.groups[i]);
        }
        listed.parts += 1;
        CHECK(part.next == 0 || part.next > next);
        next = part.next;
    } while (next != 0);
    return listed;
}

}  // namespace

TEST(a_namespaces_blocks_are_listed_once_with_the_blocks_before_them) {
    SmallCache cache;
    const Space space = cache.open();
    const Space other = cache.open(plain_geometry(512), 2);
    const SessionId session = cache.session();
    const Hashes blocks = chain(1, 20);
    CHECK_EQUAL(cache.put(session, space, blocks), 20u);
    CHECK_EQUAL(cache.put(session, other, chain(2, 20)), 20u);
    for (const std::size_t limit : {1u, 7u, 20u, 100u}) {
        const Listed listed = list_all(cache, namespace_of(space), limit);
        CHECK_EQUAL(listed.hashes.size(), 20u);
        CHECK(listed.groups == std::set<std::uint64_t>{group_of(space)});
        for (std::size_t i = 0; i < 20; ++i) {
            const auto hash = hash_at(blocks, i);
            const auto found = listed.parents.find(Hashes(hash.begin(), hash.end()));
            CHECK(found != listed.parents.end());
            const auto before = hash_at(blocks, i == 0 ? 0 : i - 1);
            CHECK(found->second == (i == 0 ? Hashes(kHashBytes, 0) : Hashes(before.begin(), before.end())));
        }
    }
    CHECK_EQUAL(cache->search().list(namespace_of(space), 1u << 30, 5).next, 0u);
}

TEST(a_block_that_is_not_here_any_more_is_nobodys_parent) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const Hashes blocks = chain(1, 3);
    CHECK_EQUAL(cache.put(session, space, blocks), 3u);
    CHECK_EQUAL(cache->removals().invalidate(space, std::span(blocks).subspan(kHashBytes, kHashBytes)), 1u);
    const auto last = hash_at(blocks, 2);
    const Hashes orphan(last.begin(), last.end());
    CHECK(list_all(cache, namespace_of(space), 100).parents.at(orphan) == orphan);
    // Others have its number by now.
    CHECK_EQUAL(cache.put(session, space, chain(2, 30)), 30u);
    CHECK(list_all(cache, namespace_of(space), 100).parents.at(orphan) == orphan);
}

TEST(a_block_that_moves_while_it_is_read_is_listed) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, space, chain(1, 200)), 200u);
    const IndexFile index = cache.open_index();
    std::atomic<bool> is_over = false;
    std::thread mover([&] {
        for (int round = 0; round < 20000; ++round) {
            for (EntryNumber number = 0; number < index.view().header->entry_count.load(); ++number) {
                std::atomic<std::uint64_t>& word = index.view().entries[number].word;
                if (const EntryWord now(word.load()); now.is_readable()) {
                    word.store(now.with_state(EntryState::moving).bits());
                    word.store(now.next(EntryState::readable).bits());
                }
            }
        }
        is_over = true;
    });
    std::size_t fewest = 200;
    while (!is_over) {
        fewest = std::min(fewest, cache->search().list(namespace_of(space), 0, 300).hashes.size());
    }
    mover.join();
    CHECK_EQUAL(fewest, 200u);
}
