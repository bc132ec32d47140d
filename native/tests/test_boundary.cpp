#include "index/boundary.hpp"

#include <algorithm>
#include <limits>
#include <random>
#include <set>

#include "index_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::uint32_t kNamespace = 6;

GroupGeometry make_group(BoundaryRule rule, std::uint32_t block_size, std::uint32_t window = 0) {
    return {.record_bytes = 64, .block_size = block_size, .window = window, .shards = 1, .rule = rule};
}

// One request in an index: which blocks of which group are there.
struct Scene {
    Geometry geometry;
    std::vector<Key> chain;
    std::vector<std::uint8_t> bytes;
    std::set<std::pair<std::size_t, std::uint64_t>> present;  // group, position

    Key key_of(std::size_t group, std::uint64_t position) const {
        const std::uint64_t stride = geometry.groups[group].block_size / geometry.hash_block_size;
        return {chain[(position + 1) * stride - 1].hash, make_space(kNamespace, static_cast<std::uint32_t>(group))};
    }
    std::uint64_t hashed_tokens() const { return chain.size() * geometry.hash_block_size; }
};

Scene make_scene(Geometry geometry, std::size_t hashes, std::uint64_t first_number) {
    Scene scene;
    scene.geometry = std::move(geometry);
    for (std::size_t i = 0; i < hashes; ++i) {
        scene.chain.push_back(make_key(first_number + i));
    }
    scene.bytes = pack_hashes(scene.chain);
    return scene;
}

// The rules, said once more and as plainly as can be: token by token, and every boundary from the largest down.
class PlainSearch {
public:
    PlainSearch(const Scene& scene, const BoundaryQuery& query) : scene_(scene), query_(query) {}

    std::uint64_t find() const {
        const auto& groups = scene_.geometry.groups;
        const auto keeps = [](const GroupGeometry& group) { return group.rule != BoundaryRule::nothing; };
        if (std::ranges::none_of(groups, keeps)) {
            return query_.local;
        }
        const std::uint64_t limit = std::min(query_.limit, scene_.hashed_tokens());
        for (std::uint64_t boundary = limit; boundary > query_.local; --boundary) {
            bool is_good = boundary % query_.alignment == 0;
            for (std::size_t group = 0; group < groups.size() && is_good; ++group) {
                is_good = boundary % groups[group].block_size == 0 && has_needed(group, boundary);
            }
            if (is_good) {
                return boundary;
            }
        }
        return query_.local;
    }

    // Whether a block holds a token that the engine lacks and that the tokens from `boundary` on will look at.
    bool is_needed(std::size_t number, std::uint64_t position, std::uint64_t boundary) const {
        const GroupGeometry& group = scene_.geometry.groups[number];
        if (group.rule == BoundaryRule::nothing) {
            return false;
        }
        if (group.rule == BoundaryRule::exact) {
            return (position + 1) * group.block_size == boundary;
        }
        bool is_needed = false;
        for (std::uint64_t token = position * group.block_size; token < (position + 1) * group.block_size; ++token) {
            is_needed = is_needed || (token >= query_.local && is_seen(group, token, boundary));
        }
        return is_needed;
    }

private:
    static bool is_seen(const GroupGeometry& group, std::uint64_t token, std::uint64_t boundary) {
        switch (group.rule) {
            case BoundaryRule::prefix:
                return true;
            case BoundaryRule::window:
                return token + group.window > boundary;
            case BoundaryRule::chunk:
                return token / group.window == boundary / group.window;
            default:
                return false;
        }
    }
    bool has_needed(std::size_t group, std::uint64_t boundary) const {
        for (std::uint64_t position = 0; position < boundary / scene_.geometry.groups[group].block_size; ++position) {
            if (is_needed(group, position, boundary) && !scene_.present.contains({group, position})) {
                return false;
            }
        }
        return true;
    }

    const Scene& scene_;
    const BoundaryQuery& query_;
};

class RandomScenes {
public:
    explicit RandomScenes(std::uint64_t seed) : random_(seed) {}

    Scene make(std::uint64_t first_number) {
        static constexpr std::uint32_t kFactors[] = {1, 1, 1, 2, 2, 3, 4};
        Geometry geometry{.hash_block_size = 1 + below(4), .groups = {}};
        const std::size_t count = 1 + below(5);
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t block_size = geometry.hash_block_size * kFactors[below(std::size(kFactors))];
            geometry.groups.push_back(
                make_group(static_cast<BoundaryRule>(below(5)), block_size, 1 + below(5 * block_size)));
        }
        Scene scene = make_scene(std::move(geometry), below(60), first_number);
        // From nearly everything to nearly nothing, and often with an end after which there is nothing.
        const std::uint32_t share = below(2) == 0 ? 97 : 1 + below(100);
        for (std::size_t group = 0; group < scene.geometry.groups.size(); ++group) {
            const std::uint64_t blocks = scene.hashed_tokens() / scene.geometry.groups[group].block_size;
            const std::uint64_t end = below(3) == 0 && blocks > 0 ? below(static_cast<std::uint32_t>(blocks)) : blocks;
            for (std::uint64_t position = 0; position < end; ++position) {
                if (below(100) < share) {
                    scene.present.emplace(group, position);
                }
            }
        }
        return scene;
    }

    BoundaryQuery make_query(const Scene& scene) {
        const auto tokens = static_cast<std::uint32_t>(scene.hashed_tokens());
        BoundaryQuery query{.name_space = kNamespace, .chain = scene.bytes, .local = 0, .limit = 0};
        query.local = below(3) == 0 ? 0 : below(tokens + 10);
        query.limit = below(3) == 0 ? std::numeric_limits<std::uint64_t>::max() : below(tokens + 10);
        query.alignment = below(2) == 0 ? 1 : 1 + below(12);
        return query;
    }

    std::uint32_t below(std::uint32_t limit) { return static_cast<std::uint32_t>(random_() % limit); }

private:
    std::mt19937_64 random_;
};

void put_in(IndexFixture& index, const Scene& scene, std::vector<EntryNumber>& entries) {
    for (const auto& [group, position] : scene.present) {
        entries.push_back(index.add(scene.key_of(group, position)));
    }
}

void check_finds(const IndexView& view, const Scene& scene, const BoundarySearch& search, const BoundaryQuery& query,
                 std::uint64_t boundary) {
    for (std::size_t group = 0; group < scene.geometry.groups.size(); ++group) {
        const BlockRange range = needed_blocks(scene.geometry.groups[group], query.local, boundary);
        for (std::uint64_t position = range.first; position < range.end; ++position) {
            const EntryNumber entry = search.found(group, position).entry;
            CHECK(entry != kNoEntry);
            CHECK_EQUAL(entry, find_entry(view, scene.key_of(group, position)).entry);
        }
    }
}

}  // namespace

TEST(each_rule_needs_its_blocks) {
    struct Case {
        GroupGeometry group;
        std::uint64_t local;
        std::uint64_t boundary;
        BlockRange needed;
    };
    using enum BoundaryRule;
    const Case cases[] = {
        {make_group(prefix, 16), 0, 64, {0, 4}},
        {make_group(prefix, 16), 32, 64, {2, 4}},
        {make_group(prefix, 16), 33, 64, {2, 4}},  // the engine's own block is not whole
        {make_group(prefix, 16), 47, 64, {2, 4}},
        {make_group(prefix, 16), 0, 0, {0, 0}},
        {make_group(window, 16, 1), 0, 64, {4, 4}},  // the next token sees itself alone
        {make_group(window, 16, 2), 0, 64, {3, 4}},
        {make_group(window, 16, 17), 0, 64, {3, 4}},
        {make_group(window, 16, 18), 0, 64, {2, 4}},
        {make_group(window, 16, 1000), 0, 64, {0, 4}},
        {make_group(window, 16, 1000), 20, 64, {1, 4}},
        {make_group(window, 16, 65), 0, 64, {0, 4}},
        {make_group(window, 16, 18), 50, 64, {3, 4}},
        {make_group(chunk, 16, 32), 0, 64, {4, 4}},  // a chunk begins at the boundary
        {make_group(chunk, 16, 48), 0, 64, {3, 4}},
        {make_group(chunk, 16, 40), 0, 64, {2, 4}},
        {make_group(chunk, 16, 1000), 0, 64, {0, 4}},
        {make_group(chunk, 16, 1000), 48, 64, {3, 4}},
        {make_group(exact, 16), 0, 64, {3, 4}},
        {make_group(exact, 16), 63, 64, {3, 4}},
        {make_group(exact, 16), 0, 0, {0, 0}},
        {make_group(nothing, 16), 0, 64, {0, 0}},
    };
    for (const Case& one : cases) {
        CHECK(needed_blocks(one.group, one.local, one.boundary) == one.needed);
    }
}

TEST(geometries_that_cannot_be_served_are_refused) {
    struct Case {
        const char* words;  // in the message; empty: it is good
        void (*change)(Geometry&);
    };
    const Case cases[] = {
        {"", [](Geometry&) {}},
        {"1 to 64 groups, not 0", [](Geometry& geometry) { geometry.groups.clear(); }},
        {"", [](Geometry& geometry) { geometry.groups.resize(kGroupLimit, geometry.groups[0]); }},
        {"1 to 64 groups, not 65", [](Geometry& geometry) { geometry.groups.resize(65, geometry.groups[0]); }},
        {"at least 1 token", [](Geometry& geometry) { geometry.hash_block_size = 0; }},
        {"group 1: blocks of 0 tokens", [](Geometry& geometry) { geometry.groups[1].block_size = 0; }},
        {"group 1: blocks of 24 tokens", [](Geometry& geometry) { geometry.groups[1].block_size = 24; }},
        {"group 0: blocks of 8 tokens", [](Geometry& geometry) { geometry.groups[0].block_size = 8; }},
        {"group 0: a record", [](Geometry& geometry) { geometry.groups[0].record_bytes = 0; }},
        {"group 2: an entry has 1 to 16 shards, not 0", [](Geometry& geometry) { geometry.groups[2].shards = 0; }},
        {"group 2: an entry has 1 to 16 shards, not 17", [](Geometry& geometry) { geometry.groups[2].shards = 17; }},
        {"", [](Geometry& geometry) { geometry.groups[2].shards = 16; }},
        {"group 0: an entry of 16 records",
         [](Geometry& geometry) {
             geometry.groups[0].shards = 16;
             geometry.groups[0].record_bytes = std::uint64_t{1} << 60;
         }},
        {"group 1: its rule needs a window", [](Geometry& geometry) { geometry.groups[1].window = 0; }},
        {"group 2: its rule needs a window", [](Geometry& geometry) { geometry.groups[2].window = 0; }},
        {"", [](Geometry& geometry) { geometry.groups[3].window = 0; }},
        {"group 3: its rule is none",
         [](Geometry& geometry) { geometry.groups[3].rule = static_cast<BoundaryRule>(5); }},
    };
    for (const Case& one : cases) {
        Geometry geometry{16,
                          {make_group(BoundaryRule::prefix, 16), make_group(BoundaryRule::window, 32, 100),
                           make_group(BoundaryRule::chunk, 16, 1), make_group(BoundaryRule::exact, 64)}};
        one.change(geometry);
        const Status status = check_geometry(geometry);
        const std::string words = one.words;
        CHECK_EQUAL(status.ok(), words.empty());
        if (status.message().find(words) == std::string::npos) {
            fail(__FILE__, __LINE__, "'" + status.message() + "' does not say: " + words);
        }
    }
}

// The search is used again and again, as the cache does, so that nothing of an earlier request may remain in it.
TEST(the_boundary_is_that_of_a_plain_search) {
    RandomScenes scenes(2024);
    BoundarySearch search;
    std::size_t hits = 0;
    std::uint64_t number = 0;
    for (int part = 0; part < 40; ++part) {
        IndexFixture index(20'000);
        for (int i = 0; i < 50; ++i, number += 100) {
            const Scene scene = scenes.make(number);
            CHECK(check_geometry(scene.geometry).ok());
            std::vector<EntryNumber> entries;
            put_in(index, scene, entries);
            for (int question = 0; question < 4; ++question) {
                const BoundaryQuery query = scenes.make_query(scene);
                const std::uint64_t boundary = search.find(index.view(), scene.geometry, query);
                CHECK_EQUAL(boundary, PlainSearch(scene, query).find());
                if (boundary > query.local) {
                    ++hits;
                    check_finds(index.view(), scene, search, query, boundary);
                }
            }
        }
    }
    CHECK(hits > 1'500);
}

TEST(the_blocks_needed_are_those_whose_tokens_are) {
    RandomScenes scenes(77);
    for (int round = 0; round < 3'000; ++round) {
        const Scene scene = scenes.make(0);
        BoundaryQuery query = scenes.make_query(scene);
        for (std::size_t number = 0; number < scene.geometry.groups.size(); ++number) {
            const GroupGeometry& group = scene.geometry.groups[number];
            const std::uint64_t boundary = (1 + scenes.below(20)) * std::uint64_t{group.block_size};
            query.local = scenes.below(static_cast<std::uint32_t>(boundary));
            const BlockRange range = needed_blocks(group, query.local, boundary);
            const PlainSearch plain(scene, query);
            for (std::uint64_t position = 0; position < boundary / group.block_size; ++position) {
                const bool is_in = position >= range.first && position < range.end;
                CHECK_EQUAL(is_in, plain.is_needed(number, position, boundary));
            }
        }
    }
}

TEST(long_prefixes_end_where_the_first_block_is_missing) {
    IndexFixture index(4'000);
    Scene scene = make_scene({16, {make_group(BoundaryRule::prefix, 16)}}, 1'500, 0);
    std::vector<EntryNumber> entries;
    for (std::uint64_t position = 0; position < scene.chain.size(); ++position) {
        scene.present.emplace(0, position);
    }
    put_in(index, scene, entries);
    BoundarySearch search;
    // Around the steps in which a prefix is looked up.
    for (const std::uint64_t missing : {0u, 1u, 255u, 256u, 257u, 511u, 512u, 1'024u, 1'499u}) {
        index.remove(entries[missing]);
        for (const std::uint64_t local : {0u, 16u, 100u, 4'096u, 4'100u}) {
            const BoundaryQuery query{kNamespace, scene.bytes, local, 1'500 * 16, 1};
            const std::uint64_t expected = local / 16 > missing ? 1'500 * 16 : std::max(local, missing * 16);
            CHECK_EQUAL(search.find(index.view(), scene.geometry, query), expected);
        }
        entries[missing] = index.add(scene.key_of(0, missing));
    }
}

TEST(questions_without_an_answer_are_answered_by_what_the_engine_has) {
    IndexFixture index(1'000);
    Scene scene = make_scene({4, {make_group(BoundaryRule::prefix, 4), make_group(BoundaryRule::exact, 8)}}, 40, 0);
    for (std::uint64_t position = 0; position < 20; ++position) {
        scene.present.emplace(0, 2 * position);
        scene.present.emplace(0, 2 * position + 1);
        scene.present.emplace(1, position);
    }
    std::vector<EntryNumber> entries;
    put_in(index, scene, entries);
    BoundarySearch search;
    const auto ask = [&](std::uint64_t local, std::uint64_t limit, std::uint64_t alignment) {
        return search.find(index.view(), scene.geometry, {kNamespace, scene.bytes, local, limit, alignment});
    };
    constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
    CHECK_EQUAL(ask(0, kMost, 1), 160u);
    CHECK_EQUAL(ask(0, 0, 1), 0u);
    CHECK_EQUAL(ask(5, 7, 1), 5u);
    CHECK_EQUAL(ask(160, kMost, 1), 160u);
    CHECK_EQUAL(ask(1'000, kMost, 1), 1'000u);
    CHECK_EQUAL(ask(kMost, kMost, 1), kMost);
    CHECK_EQUAL(ask(0, kMost, 7), 112u);
    CHECK_EQUAL(ask(3, kMost, 0), 3u);
    // Alignments whose common multiple with the blocks is beyond every number.
    CHECK_EQUAL(ask(3, kMost, kMost), 3u);
    CHECK_EQUAL(ask(3, kMost, (std::uint64_t{1} << 63) + 1), 3u);
    CHECK_EQUAL(ask(3, kMost, 161), 3u);
    const BoundaryQuery empty{kNamespace, {}, 3, kMost, 1};
    CHECK_EQUAL(search.find(index.view(), scene.geometry, empty), 3u);
    const BoundaryQuery stranger{kNamespace + 1, scene.bytes, 3, kMost, 1};
    CHECK_EQUAL(search.find(index.view(), scene.geometry, stranger), 3u);
}
