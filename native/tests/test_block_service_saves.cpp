#include <algorithm>
#include <set>

#include "express_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::uint64_t kNotFound = express::kNotFound;
constexpr std::uint64_t kMalformed = express::kMalformed;

// Slots for these blocks with the right bytes in them.
std::vector<Ticket> write_blocks(ExpressScene& scene, std::uint32_t group, const Hashes& hashes) {
    const Answer granted = scene.ask(express::kCredits, scene.credits_fields(group, 0, hashes));
    CHECK_EQUAL(granted.tickets.size(), hashes.size() / kHashBytes);
    scene.cache.write(scene.session, scene.space(group), hashes, granted.tickets);
    return granted.tickets;
}

std::vector<std::uint64_t> digests_of(ExpressScene& scene, std::uint32_t group, std::uint32_t shard,
                                      const std::vector<Ticket>& tickets, const Hashes& hashes) {
    const std::vector<std::uint64_t> addresses = scene.cache.locate(scene.session, tickets);
    std::vector<std::uint64_t> digests;
    for (std::size_t i = 0; i < tickets.size(); ++i) {
        digests.push_back(digest_by_hand(scene.cache, scene.space(group), addresses[i], hash_at(hashes, i), shard));
    }
    return digests;
}

}  // namespace

TEST(credits_are_granted_by_count) {
    ExpressScene scene;
    const Answer granted = scene.ask(express::kCredits, scene.credits_fields(0, 128));
    CHECK_EQUAL(granted.op, std::uint64_t{express::kCreditsGranted});
    CHECK_EQUAL(std::set<Ticket>(granted.tickets.begin(), granted.tickets.end()).size(), 128u);
    CHECK_EQUAL(std::ranges::count(granted.tickets, Ticket{0}), 0);
    CHECK(granted.addresses == scene.cache.locate(scene.session, granted.tickets));
    CHECK_EQUAL(std::set<std::uint64_t>(granted.addresses.begin(), granted.addresses.end()).size(), 128u);
    CHECK_EQUAL(scene.cache->stats().reserved, 128u);
    scene.tell(express::kAbort, {numbers(granted.tickets)});
    scene.check_nothing_held();
    // None are wanted, with and without the fields that say so.
    for (FieldList fields = scene.credits_fields(1, 0); fields.size() >= 2; fields.pop_back()) {
        CHECK(scene.ask(express::kCredits, fields).tickets.empty());
    }
}

TEST(credits_are_granted_for_what_is_not_readable) {
    ExpressScene scene;
    scene.put_all(1, 64);
    const Answer granted = scene.ask(express::kCredits, scene.credits_fields(1, 0, chain(1, 6)));
    CHECK_EQUAL(granted.tickets.size(), 6u);
    CHECK_EQUAL(std::ranges::count(granted.tickets, Ticket{0}), 4);
    for (std::size_t i = 0; i < 6; ++i) {
        CHECK_EQUAL(granted.tickets[i] == 0, i < 4);
        CHECK_EQUAL(granted.addresses[i] == kNoAddress, i < 4);
    }
    CHECK_EQUAL(scene.cache->stats().reserved, 2u);
    // Not sent, so they are given back.
    scene.service->settle(false);
    scene.check_nothing_held();
}

TEST(a_session_gets_as_many_credits_as_it_may_hold) {
    ExpressScene scene;
    ExpressRights rights = scene.rights();
    rights.cache_session = scene.cache.session(3 * 1024);
    scene.renew(rights);
    CHECK_EQUAL(scene.ask(express::kCredits, scene.credits_fields(1, 7)).tickets.size(), 3u);
    CHECK(scene.ask(express::kCredits, scene.credits_fields(1, 7)).tickets.empty());
    CHECK(scene.cache->sessions().quarantine(rights.cache_session));
    CHECK(scene.ask(express::kCredits, scene.credits_fields(4, 1)).tickets.empty());
    CHECK_EQUAL(scene.cache->stats().reserved, 3u);
}

TEST(credits_name_what_there_is) {
    ExpressScene scene;
    CHECK_EQUAL(scene.refuse(express::kCredits, {whole(scene.name_space + 1), whole(0), whole(1)}), kNotFound);
    for (const std::uint64_t group : {5u, 63u, 64u, 65535u}) {
        CHECK_EQUAL(scene.refuse(express::kCredits, {whole(scene.name_space), whole(group), whole(1)}), kNotFound);
    }
    CHECK_EQUAL(scene.refuse(express::kCredits, {whole(scene.name_space), whole(65536), whole(1)}), kMalformed);
    CHECK_EQUAL(scene.refuse(express::kCredits, {whole(scene.name_space)}), kMalformed);
    CHECK_EQUAL(scene.refuse(express::kCredits, scene.credits_fields(0, 129)), kMalformed);
    CHECK_EQUAL(scene.refuse(express::kCredits, scene.credits_fields(0, 0, chain(1, 129))), kMalformed);
    CHECK_EQUAL(scene.refuse(express::kCredits, scene.credits_fields(0, 1, chain(1, 1))), kMalformed);
    ExpressRights rights = scene.rights();
    rights.tenant = 7;  // which there is not
    scene.renew(rights);
    CHECK_EQUAL(scene.refuse(express::kCredits, scene.credits_fields(0, 1)), std::uint64_t{express::kInternal});
}

TEST(credits_count_for_the_tenant_of_the_channel) {
    ExpressScene scene;
    ExpressRights rights = scene.rights();
    rights.tenant = value_of(scene.cache->open_tenant("other", 1 << 20));
    scene.renew(rights);
    CHECK_EQUAL(scene.ask(express::kCredits, scene.credits_fields(1, 3)).tickets.size(), 3u);
    CHECK_EQUAL(scene.cache->stats().tenants.at(rights.tenant).used_bytes, 3u * 1024);
}

TEST(a_publish_may_name_who_pays) {
    ExpressScene scene;
    ExpressRights rights = scene.rights();
    const TenantNumber other = value_of(scene.cache->open_tenant("other", 1 << 20));
    rights.tenant = value_of(scene.cache->open_tenant("own", 1 << 20));
    rights.tenants = {rights.tenant, other};
    scene.renew(rights);
    const std::uint32_t shards = scene.cache.group(scene.space(0)).shards;
    std::uint64_t prompt = 0;
    const auto save = [&](std::uint64_t place) {
        const Hashes hashes = chain(++prompt, 1);
        const std::vector<Ticket> tickets = write_blocks(scene, 0, hashes);
        for (std::uint32_t shard = 0; shard < shards; ++shard) {
            scene.tell(express::kPublish, scene.publish_fields(0, shard, tickets, hashes, {}, {}, place));
        }
        CHECK_EQUAL(scene.cache.count_readable(scene.space(0), hashes), 1u);
    };
    const auto used = [&](TenantNumber tenant) { return scene.cache->stats().tenants.at(tenant).used_bytes; };
    save(2);
    const std::uint64_t block_bytes = used(other);
    CHECK(block_bytes > 0);
    CHECK_EQUAL(used(rights.tenant), 0u);
    for (const std::uint64_t place : {0u, 1u, 3u, 65535u}) {
        save(place);  // its own, or nobody that it may name
    }
    CHECK_EQUAL(used(rights.tenant), 4 * block_bytes);
    CHECK_EQUAL(used(other), block_bytes);
}

TEST(blocks_are_readable_with_all_their_shards) {
    for (const bool has_parents : {false, true}) {
        for (const bool has_digests : {false, true}) {
            ExpressScene scene;
            for (std::uint32_t group = 0; group < 5; ++group) {
                const Hashes hashes = scene.keys(group, 3, 0, 4);
                const std::vector<Ticket> tickets = write_blocks(scene, group, hashes);
                const std::uint32_t shard_count = scene.cache.group(scene.space(group)).shards;
                for (std::uint32_t shard = 0; shard < shard_count; ++shard) {
                    CHECK_EQUAL(scene.cache.count_readable(scene.space(group), hashes), 0u);
                    FieldList fields = scene.publish_fields(
                        group, shard, tickets, hashes, has_parents ? parents_of(hashes) : Hashes(),
                        has_digests ? digests_of(scene, group, shard, tickets, hashes) : std::vector<std::uint64_t>());
                    fields.resize(has_digests ? 7 : has_parents ? 6 : 5);
                    scene.tell(express::kPublish, fields);
                }
                CHECK_EQUAL(scene.cache.count_readable(scene.space(group), hashes), 4u);
                const std::vector<std::uint64_t> of = {0, shard_count - 1};
                const Answer answer = scene.ask(express::kAcquireEntries, scene.entries_fields(group, hashes, of));
                scene.check_group(answer.groups.at(0), group, hashes, of);
                scene.tell(express::kRelease, {numbers({answer.lease})});
            }
            scene.check_nothing_held();
        }
    }
}

TEST(digests_that_are_sent_are_those_that_are_told) {
    ExpressScene scene;
    const Hashes hashes = chain(1, 3);
    const std::vector<Ticket> tickets = write_blocks(scene, 0, hashes);
    scene.tell(express::kPublish, scene.publish_fields(0, 1, tickets, hashes, {}, {11, 12, 13}));
    scene.tell(express::kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {1, 2, 3}));
    const Answer answer = scene.ask(express::kAcquireEntries, scene.entries_fields(0, hashes, {0, 1}));
    CHECK((answer.groups.at(0).digests == std::vector<std::uint64_t>{1, 2, 3, 11, 12, 13}));
}

TEST(one_publish_may_be_of_several_shards) {
    ExpressScene scene;
    scene.log.watch(true);
    const Hashes hashes = chain(1, 3);
    const std::vector<Ticket> tickets = write_blocks(scene, 0, hashes);
    scene.tell(express::kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {1, 2, 3, 11, 12, 13}, 0, 1));
    const StoredLog::Taken taken = scene.log.take();
    CHECK_EQUAL(taken.stored.size(), 1u);
    CHECK(taken.stored[0].hashes == hashes);
    const Answer answer = scene.ask(express::kAcquireEntries, scene.entries_fields(0, hashes, {0, 1}));
    CHECK((answer.groups.at(0).digests == std::vector<std::uint64_t>{1, 2, 3, 11, 12, 13}));
}

TEST(parents_are_the_blocks_before) {
    for (const bool has_parents : {false, true}) {
        ExpressScene scene(small_terms(), small_options(1, "prefix"));
        const Hashes hashes = chain(1, 2);
        for (std::uint64_t block = 0; block < 2; ++block) {
            const Hashes one = chain(1, 1, block);
            const Hashes before = block == 0 ? Hashes(kHashBytes) : chain(1, 1);
            const std::vector<Ticket> tickets = write_blocks(scene, 0, one);
            for (const std::uint32_t shard : {0u, 1u}) {
                scene.tell(express::kPublish,
                           scene.publish_fields(0, shard, tickets, one, has_parents ? before : Hashes()));
            }
        }
        scene.cache->removals().evict(1);
        // The block that has another one as its parent is evicted before it.
        CHECK_EQUAL(scene.cache.count_readable(scene.space(0), chain(1, 1, has_parents ? 0 : 1)), 1u);
        CHECK_EQUAL(scene.cache.count_readable(scene.space(0), hashes), 1u);
    }
}

TEST(publish_names_what_there_is_and_has_as_much_of_everything) {
    ExpressScene scene;
    scene.log.watch(true);
    const Hashes hashes = chain(1, 2);
    const std::vector<Ticket> tickets = write_blocks(scene, 0, hashes);
    using express::kPublish;
    FieldList wrong = scene.publish_fields(0, 0, tickets, hashes);
    wrong[0] = whole(scene.name_space + 1);
    CHECK_EQUAL(scene.refuse(kPublish, wrong), kNotFound);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 2, tickets, hashes)), kNotFound);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(1, 1, tickets, hashes)), kNotFound);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(5, 0, tickets, hashes)), kNotFound);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 65536, tickets, hashes)), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, chain(1, 1))), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, chain(1, 3))), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, chain(1, 1))), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {1})), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {1, 2, 3})), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {1, 0})), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, std::vector<Ticket>(129), chain(1, 129))),
                kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {}, 65536)), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {}, 0, 65536)), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {}, 0, 2)), kNotFound);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 1, tickets, hashes, {}, {}, 0, 65535)), kNotFound);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {1, 2}, 0, 1)), kMalformed);
    CHECK_EQUAL(scene.refuse(kPublish, scene.publish_fields(0, 0, tickets, hashes, {}, {1, 2, 3}, 0, 1)), kMalformed);
    FieldList few = scene.publish_fields(0, 0, tickets, hashes);
    few.resize(4);
    CHECK_EQUAL(scene.refuse(kPublish, few), kMalformed);
    // Nothing of all this was committed, and void tickets are nothing to be told.
    CHECK_EQUAL(scene.cache.count_readable(scene.space(0), hashes), 0u);
    CHECK_EQUAL(scene.cache->stats().reserved, 2u);
    scene.tell(kPublish, scene.publish_fields(0, 0, {0, 77, ~0ull}, chain(5, 3)));
    scene.tell(kPublish, scene.publish_fields(0, 0, {}, {}));
    CHECK(scene.log.take().stored.empty());
    for (const std::uint32_t shard : {0u, 1u}) {
        scene.tell(kPublish, scene.publish_fields(0, shard, tickets, hashes));
    }
    CHECK_EQUAL(scene.cache.count_readable(scene.space(0), hashes), 2u);
}

TEST(tickets_are_of_the_session_of_the_channel) {
    ExpressScene scene;
    const SessionId other = scene.cache.session();
    const std::vector<Ticket> tickets = scene.cache.reserve(other, scene.space(1), chain(1, 2));
    scene.cache.write(other, scene.space(1), chain(1, 2), tickets);
    scene.tell(express::kPublish, scene.publish_fields(1, 0, tickets, chain(1, 2)));
    scene.tell(express::kAbort, {numbers(tickets)});
    CHECK_EQUAL(scene.cache->stats().reserved, 2u);
    CHECK_EQUAL(scene.cache.count_readable(scene.space(1), chain(1, 2)), 0u);
}

TEST(aborted_slots_are_given_back) {
    ExpressScene scene;
    std::vector<Ticket> tickets = write_blocks(scene, 0, chain(1, 3));
    const std::vector<Ticket> some = {tickets[0], 0, 99, tickets[2], tickets[0]};
    scene.tell(express::kAbort, {numbers(some)});
    CHECK_EQUAL(scene.cache->stats().reserved, 1u);
    scene.tell(express::kAbort, {numbers({})});
    CHECK_EQUAL(scene.refuse(express::kAbort, {}), kMalformed);
    CHECK_EQUAL(scene.refuse(express::kAbort, {numbers(std::vector<Ticket>(129))}), kMalformed);
    scene.tell(express::kAbort, {numbers(tickets)});
    scene.check_nothing_held();
}

TEST(the_log_has_what_became_readable) {
    ExpressScene scene;
    const Hashes hashes = chain(1, 4);
    const Hashes parents = parents_of(hashes);
    std::vector<Ticket> tickets = write_blocks(scene, 1, hashes);
    const Hashes unheard = chain(2, 1);
    scene.tell(express::kPublish, scene.publish_fields(1, 0, write_blocks(scene, 1, unheard), unheard));
    scene.log.watch(true);
    CHECK(scene.log.take().stored.empty());
    CHECK_EQUAL(scene.cache.put(scene.session, scene.space(1), chain(1, 1, 1)), 1u);  // another writer is first
    tickets[3] = 0;
    scene.tell(express::kPublish, scene.publish_fields(1, 0, tickets, hashes, parents));
    StoredLog::Taken taken = scene.log.take();
    CHECK_EQUAL(taken.stored.size(), 1u);
    CHECK_EQUAL(taken.stored[0].owner, 5u);
    CHECK_EQUAL(taken.stored[0].group, 1u);
    Hashes wanted = chain(1, 1);
    const Hashes third = chain(1, 1, 2);
    wanted.insert(wanted.end(), third.begin(), third.end());
    CHECK(taken.stored[0].hashes == wanted);
    Hashes wanted_parents(kHashBytes);
    const Hashes second = chain(1, 1, 1);
    wanted_parents.insert(wanted_parents.end(), second.begin(), second.end());
    CHECK(taken.stored[0].parents == wanted_parents);
    CHECK_EQUAL(taken.lost, 0u);

    // With the last shard, and without parents if none were sent.
    const Hashes others = chain(3, 2);
    const std::vector<Ticket> sharded = write_blocks(scene, 0, others);
    scene.tell(express::kPublish, scene.publish_fields(0, 1, sharded, others));
    CHECK(scene.log.take().stored.empty());
    scene.tell(express::kPublish, scene.publish_fields(0, 0, sharded, others));
    taken = scene.log.take();
    CHECK_EQUAL(taken.stored.size(), 1u);
    CHECK_EQUAL(taken.stored[0].group, 0u);
    CHECK(taken.stored[0].hashes == others && taken.stored[0].parents.empty());
}
