#include "cache/namespace_table.hpp"

#include <random>
#include <set>

#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

struct Namespaces {
    IndexFile index = small_index();
    NamespaceTable table{index.view(), reserve_in(index)};
};

}  // namespace

TEST(an_identity_has_one_number) {
    Namespaces namespaces;
    CHECK(namespaces.table.find(0) == nullptr);
    CHECK_EQUAL(value_of(namespaces.table.open(fingerprint(7), hybrid_geometry())), 0u);
    CHECK_EQUAL(value_of(namespaces.table.open(fingerprint(8), hybrid_geometry())), 1u);
    CHECK_EQUAL(value_of(namespaces.table.open(fingerprint(7), hybrid_geometry())), 0u);
    const auto other = namespaces.table.open(fingerprint(7), plain_geometry());
    CHECK(!other.ok() && other.fault().code() == Code::invalid);
    CHECK_EQUAL(namespaces.table.count(), 2u);
    CHECK(namespaces.table.find(1)->geometry == hybrid_geometry());
    CHECK(namespaces.table.find(1)->fingerprint == fingerprint(8));
    CHECK(namespaces.table.find(2) == nullptr);
}

TEST(geometries_that_cannot_be_served_change_nothing) {
    Namespaces namespaces;
    std::vector<Geometry> refused(6, plain_geometry());
    refused[0].groups.clear();
    refused[1].groups[0].shards = 0;
    refused[2].groups[0].record_bytes = kSegmentBytes + 1;
    refused[3].groups[0] = {.record_bytes = kSegmentBytes / 2 + 1, .block_size = 16, .window = 0, .shards = 2};
    refused[4].groups[0] = {.record_bytes = (1ull << 60) + 16, .block_size = 16, .window = 0, .shards = 16};
    refused[5].groups[0].record_bytes = ~0ull;
    for (const Geometry& geometry : refused) {
        const auto number = namespaces.table.open(fingerprint(1), geometry);
        CHECK(!number.ok() && number.fault().code() == Code::invalid);
        CHECK(number.fault().message().find('\n') == std::string::npos);
    }
    CHECK_EQUAL(namespaces.table.count(), 0u);
    CHECK(namespaces.table.open(fingerprint(1), plain_geometry(kSegmentBytes / 2, 2)).ok());
}

TEST(what_follows_from_a_geometry) {
    Namespaces namespaces;
    namespaces.table.adopt();  // nothing to find
    CHECK(namespaces.table.open(fingerprint(1), hybrid_geometry()).ok());
    const Namespace& hybrid = *namespaces.table.find(0);
    CHECK(hybrid.needs_state && hybrid.has_shards);
    const std::vector<Reuse> reuse = {Reuse::prefix, Reuse::window, Reuse::exact, Reuse::window, Reuse::prefix};
    const std::vector<std::uint64_t> slot_bytes = {6000, 1024, 20000, 512, 64};
    // A window of 40 tokens: the next token sees 39 before it, in 3 blocks of 16. Of a chunk of 128
    // tokens a boundary inside it needs what lies before: at most three blocks of 32.
    const std::vector<std::uint32_t> windows = {0, 3, 0, 3, 0};
    for (std::size_t i = 0; i < hybrid.groups.size(); ++i) {
        CHECK(hybrid.groups[i].reuse == reuse[i]);
        CHECK_EQUAL(hybrid.groups[i].slot_bytes, slot_bytes[i]);
        CHECK_EQUAL(hybrid.groups[i].class_bytes, slot_bytes[i]);
        CHECK_EQUAL(hybrid.groups[i].anchor, 0u);
        CHECK_EQUAL(hybrid.groups[i].window_blocks, windows[i]);
    }
    Geometry states = plain_geometry();
    states.groups[0].rule = BoundaryRule::exact;
    states.groups.push_back(states.groups[0]);
    CHECK(namespaces.table.open(fingerprint(2), states).ok());
    CHECK_EQUAL(namespaces.table.find(1)->groups[1].anchor, 1u);  // no prefix group: itself
    CHECK(!namespaces.table.find(1)->has_shards);
}

TEST(records_of_nearly_one_size_have_slots_of_the_largest) {
    Namespaces namespaces;
    Geometry several = plain_geometry();
    for (const std::uint64_t bytes : {32'000u, 33'000u, 33'001u, 34'000u, 500'000u}) {
        several.groups.push_back(several.groups[0]);
        several.groups.back().record_bytes = bytes;
    }
    CHECK(namespaces.table.open(fingerprint(1), several).ok());
    const std::vector<GroupFacts>& groups = namespaces.table.find(0)->groups;
    const std::vector<std::uint64_t> class_bytes = {4096, 33'000, 34'000, 34'000, 34'000, 500'000};
    for (std::size_t i = 0; i < groups.size(); ++i) {
        CHECK_EQUAL(groups[i].slot_bytes, several.groups[i].slot_bytes());
        CHECK_EQUAL(groups[i].class_bytes, class_bytes[i]);
    }
}

TEST(there_is_a_bound_of_identities) {
    Namespaces namespaces;
    Fingerprint name{};
    for (std::uint32_t i = 0; i < kNamespaceLimit; ++i) {
        std::memcpy(name.data(), &i, sizeof(i));
        CHECK_EQUAL(value_of(namespaces.table.open(name, plain_geometry())), i);
    }
    CHECK(namespaces.table.open(fingerprint(0xff), plain_geometry()).fault().code() == Code::failed);
    CHECK_EQUAL(value_of(namespaces.table.open(name, plain_geometry())), kNamespaceLimit - 1);
}

TEST(a_successor_knows_the_same_identities) {
    Namespaces namespaces;
    CHECK(namespaces.table.open(fingerprint(1), hybrid_geometry()).ok());
    CHECK(namespaces.table.open(fingerprint(2), plain_geometry()).ok());
    NamespaceTable successor(namespaces.index.view(), reserve_in(namespaces.index));
    successor.adopt();
    CHECK_EQUAL(successor.count(), 2u);
    CHECK(successor.find(0)->geometry == hybrid_geometry());
    CHECK(successor.find(1)->fingerprint == fingerprint(2));
    CHECK_EQUAL(value_of(successor.open(fingerprint(2), plain_geometry())), 1u);
    CHECK_EQUAL(value_of(successor.open(fingerprint(3), plain_geometry())), 2u);
}

namespace {

Fingerprint name_of(std::uint32_t number) {
    Fingerprint name{};
    std::memcpy(name.data(), &number, sizeof(number));
    return name;
}

// Opens as many namespaces as there can be.
void fill(NamespaceTable& table) {
    for (std::uint32_t i = 0; i < kNamespaceLimit; ++i) {
        CHECK_EQUAL(value_of(table.open(name_of(i), plain_geometry())), i);
    }
}

std::vector<std::uint32_t> forget(NamespaceTable& table, std::set<std::uint32_t> numbers) {
    return table.forget([&](std::uint32_t number) { return numbers.contains(number); });
}

}  // namespace

TEST(a_place_that_was_given_back_is_another_identitys_under_another_number) {
    Namespaces namespaces;
    NamespaceTable reader(namespaces.index.view(), reserve_in(namespaces.index));
    fill(namespaces.table);
    CHECK(namespaces.table.open(fingerprint(0xff), plain_geometry()).fault().code() == Code::failed);
    CHECK_EQUAL(forget(namespaces.table, {9, 5}).size(), 2u);
    CHECK_EQUAL(namespaces.table.known(), kNamespaceLimit - 2);
    CHECK(namespaces.table.find(5) == nullptr && namespaces.table.find(6) != nullptr);
    reader.adopt();
    CHECK(reader.find(5) == nullptr && reader.find(kNamespaceLimit - 1) != nullptr);

    const std::uint32_t other = value_of(namespaces.table.open(fingerprint(0xff), hybrid_geometry()));
    const std::uint32_t third = value_of(namespaces.table.open(fingerprint(0xfe), plain_geometry()));
    CHECK_EQUAL(other, next_namespace(5));
    CHECK_EQUAL(third, next_namespace(9));
    CHECK(namespaces.table.open(fingerprint(0xfd), plain_geometry()).fault().code() == Code::failed);
    reader.adopt();
    for (const NamespaceTable* table : {&reader, &namespaces.table}) {
        CHECK(table->find(5) == nullptr && !table->use(9));
        CHECK(table->find(other)->geometry == hybrid_geometry());
        CHECK(table->find(third)->fingerprint == fingerprint(0xfe));
        CHECK_EQUAL(table->known(), kNamespaceLimit);
    }
}

TEST(a_reader_forgets_whose_place_another_has) {
    Namespaces namespaces;
    NamespaceTable reader(namespaces.index.view(), reserve_in(namespaces.index));
    fill(namespaces.table);
    reader.adopt();
    std::uint32_t number = 7;
    for (std::uint8_t round = 1; round < 10; ++round) {
        CHECK_EQUAL(forget(namespaces.table, {number}).size(), 1u);
        const std::uint32_t before = number;
        number = value_of(namespaces.table.open(fingerprint(round), round % 2 ? hybrid_geometry() : plain_geometry()));
        reader.adopt();
        CHECK(!reader.use(before));
        CHECK(reader.use(number)->fingerprint == fingerprint(round));
        CHECK_EQUAL(reader.known(), kNamespaceLimit);
    }
}

TEST(no_number_is_given_twice_also_by_a_successor) {
    Namespaces namespaces;
    std::set<std::uint32_t> given;
    fill(namespaces.table);
    const auto turn = [&](NamespaceTable& table, std::uint32_t first) {
        for (std::uint32_t i = first; i < first + 1000; ++i) {
            CHECK_EQUAL(forget(table, {table.list().front()}).size(), 1u);
            const std::uint32_t number = value_of(table.open(name_of(i), plain_geometry()));
            CHECK(number >= kNamespaceLimit && given.insert(number).second);
        }
        // The successor finds free places.
        CHECK_EQUAL(table.forget([](std::uint32_t number) { return number % 2 == 0; }).size(), kNamespaceLimit / 2);
        for (std::uint32_t i = 0; i < 10; ++i) {
            const std::uint32_t number = value_of(table.open(name_of(first + 1000 + i), plain_geometry()));
            CHECK(given.insert(number).second);
        }
    };
    turn(namespaces.table, 10'000);
    NamespaceTable successor(namespaces.index.view(), reserve_in(namespaces.index));
    successor.adopt();
    CHECK_EQUAL(successor.known(), namespaces.table.known());
    for (std::uint32_t i = 20'000; successor.known() < kNamespaceLimit; ++i) {
        CHECK(given.insert(value_of(successor.open(name_of(i), plain_geometry()))).second);
    }
    turn(successor, 30'000);
}

TEST(numbers_begin_anew_after_very_many) {
    Namespaces namespaces;
    fill(namespaces.table);
    NamespaceRecord& record = namespaces.index.view().namespaces[3];
    record.number = kNamespaceNumbers - kNamespaceLimit + 3;
    NamespaceTable table(namespaces.index.view(), reserve_in(namespaces.index));
    table.adopt();
    CHECK(table.find(record.number) != nullptr && table.find(3) == nullptr);
    CHECK_EQUAL(forget(table, {record.number}).size(), 1u);
    CHECK_EQUAL(value_of(table.open(fingerprint(0xff), plain_geometry())), 3u);
}

TEST(an_identity_that_a_call_goes_on_with_stays) {
    Namespaces namespaces;
    CHECK_EQUAL(value_of(namespaces.table.open(fingerprint(1), plain_geometry())), 0u);
    NamespaceUse use = namespaces.table.use(0);
    CHECK(use && !namespaces.table.use(1));
    CHECK(forget(namespaces.table, {0}).empty());
    CHECK(namespaces.table.find(0) == use.get());
    NamespaceUse moved = std::move(use);
    CHECK(forget(namespaces.table, {0}).empty());
    CHECK(moved->fingerprint == fingerprint(1));
    moved = NamespaceUse();
    CHECK_EQUAL(forget(namespaces.table, {0}).size(), 1u);
    CHECK(!namespaces.table.use(0));
}

TEST(damaged_records_are_not_believed) {
    std::mt19937_64 random(5);
    for (int round = 0; round < 500; ++round) {
        Namespaces namespaces;
        for (std::uint8_t i = 0; i < 4; ++i) {
            CHECK(namespaces.table.open(fingerprint(i), i % 2 ? plain_geometry() : hybrid_geometry()).ok());
        }
        // Mostly in the fields, which lie at the record's beginning.
        auto* const bytes = reinterpret_cast<std::uint8_t*>(&namespaces.index.view().namespaces[random() % 4]);
        for (int i = 0; i < 4; ++i) {
            bytes[random() % 192] = static_cast<std::uint8_t>(random());
        }
        NamespaceTable successor(namespaces.index.view(), reserve_in(namespaces.index));
        successor.adopt();
        CHECK(successor.count() <= 4);
        for (std::uint32_t i = 0; i < successor.count(); ++i) {
            const NamespaceRecord& record = namespaces.index.view().namespaces[i];
            const Namespace* const found = successor.find(record.number);
            if (found == nullptr) {
                continue;
            }
            CHECK(check_geometry(found->geometry).ok());
            for (const GroupGeometry& group : found->geometry.groups) {
                CHECK(group.record_bytes <= kSegmentBytes / group.shards);
            }
        }
        const auto number = successor.open(fingerprint(200), plain_geometry());
        CHECK_EQUAL(value_of(number), successor.count() - 1);
    }
}
