// Many channels at once on one server. Whatever the order: what was acquired has the bytes that its key asks for, and
// in the end nothing is held.
#include <future>
#include <random>

#include "express_served.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// Saves and loads blocks as an engine does, and looks at every byte; the last release is waited for.
std::size_t use_channel(ServedScene& scene, std::uint64_t seed) {
    auto [end, other] = socket_pair();
    Peer peer(std::move(other));
    CHECK(scene.server.open(std::move(end), borrow(scene.cache), scene.rights()) != 0);
    std::mt19937_64 random(seed);
    std::uint64_t number = 0;
    std::uint64_t one_way = 0;
    std::size_t hits = 0;
    const auto ask = [&](std::uint64_t op, const FieldList& fields) {
        CHECK(peer.send(pack(make_frame({.op = op, .number = ++number}, fields))));
        Answer answer = next_answer(peer);
        CHECK_EQUAL(answer.number, number);
        CHECK(answer.op != express::kError);
        return answer;
    };
    const auto tell = [&](std::uint64_t op, const FieldList& fields) {
        CHECK(peer.send(pack(make_frame({.op = op, .number = ++one_way}, fields))));
    };
    for (int round = 0; round < 150; ++round) {
        const auto group = static_cast<std::uint32_t>(random() % 2);
        const Hashes hashes = chain(100 + random() % 40, 1 + random() % 6);
        const Answer granted = ask(express::kCredits, scene.credits_fields(group, 0, hashes));
        const std::span<const std::uint8_t> named = std::span(hashes).first(granted.tickets.size() * kHashBytes);
        scene.cache.write(scene.session, scene.space(group), named, granted.tickets);
        if (random() % 4 == 0) {
            tell(express::kAbort, {numbers(granted.tickets)});
        }
        for (std::uint32_t published = 0; published < (group == 0 ? 2 : 1); ++published) {
            tell(express::kPublish,
                 scene.publish_fields(group, published, granted.tickets, Hashes(named.begin(), named.end())));
        }
        // Asks for one shard: digests of several are unknown if another thread changes the blocks meanwhile.
        const std::vector<std::uint64_t> shard = {group == 0 ? random() % 2 : 0};
        const Answer lease = ask(express::kAcquireEntries, scene.entries_fields(group, hashes, shard));
        if (lease.is_hit()) {
            ++hits;
            scene.check_group(lease.groups.at(0), group, hashes, shard);
            tell(express::kRelease, {numbers({lease.lease})});
        }
        if (random() % 8 == 0) {
            tell(express::kInvalidate, {whole(scene.name_space), whole(group), blob(hashes)});
        }
    }
    CHECK_EQUAL(ask(express::kMark, {}).op, std::uint64_t{express::kDone});
    return hits;
}

}  // namespace

TEST(many_channels_use_one_cache) {
    ServedScene scene;
    std::vector<std::future<std::size_t>> users;
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        users.push_back(std::async(std::launch::async, [&scene, seed] { return use_channel(scene, seed); }));
    }
    for (auto& user : users) {
        CHECK(user.get() > 0);
    }
    scene.check_nothing_held();
}

TEST(channels_come_and_go_while_others_are_served) {
    ServedScene scene(6);
    std::vector<std::future<void>> users;
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        users.push_back(std::async(std::launch::async, [&scene, seed] {
            std::mt19937_64 random(seed);
            for (int round = 0; round < 100; ++round) {
                auto [end, other] = socket_pair(kSmallBuffer);
                Peer peer(std::move(other));
                const std::uint64_t channel = scene.server.open(std::move(end), borrow(scene.cache), scene.rights());
                if (channel != 0 && peer.send(scene.acquires(1 + random() % 8)) && random() % 2 == 0) {
                    peer.read_frame();
                }
                if (random() % 2 == 0) {
                    scene.server.end(channel);
                }
            }
        }));
    }
    for (auto& user : users) {
        user.get();
    }
    scene.end_session();
}
