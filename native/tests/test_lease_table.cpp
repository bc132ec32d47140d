#include "cache/lease_table.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

using Entries = std::vector<EntryNumber>;

Entries entries_from(EntryNumber first, std::size_t count) {
    Entries entries(count);
    std::iota(entries.begin(), entries.end(), first);
    return entries;
}

struct LeaseFile {
    IndexFile index = small_index();
    LeaseTable table{index.view(), reserve_in(index)};

    LeaseNode& node(std::uint64_t id) { return index.view().lease_nodes[static_cast<std::uint32_t>(id)]; }
    std::uint32_t node_limit() { return static_cast<std::uint32_t>(index.view().regions.lease_nodes.item_limit); }
};

bool closes_with(LeaseTable& table, LeaseId id, std::uint32_t session, const Entries& wanted) {
    Entries entries;
    return table.close(id, session, entries) && entries == wanted;
}

// Opens leases of one node until there is no room; how many. Every id is new.
std::uint32_t fill(LeaseTable& table, std::set<LeaseId>& ids) {
    std::uint32_t count = 0;
    const Entries one = {1};
    for (auto id = table.open(99, one); id.ok(); id = table.open(99, one)) {
        CHECK(ids.insert(id.value()).second);
        ++count;
    }
    return count;
}

// The leases that a successor reads, and its free nodes, which show whether it lost one.
struct Adopted {
    std::vector<std::pair<std::uint32_t, Entries>> leases;
    std::uint32_t free_nodes = 0;
};
Adopted adopt(LeaseFile& leases) {
    Adopted adopted;
    LeaseTable successor(leases.index.view(), reserve_in(leases.index));
    successor.adopt([&](std::uint32_t session, std::span<const EntryNumber> entries) {
        adopted.leases.emplace_back(session, Entries(entries.begin(), entries.end()));
        return true;
    });
    CHECK_EQUAL(successor.count(), adopted.leases.size());
    std::set<LeaseId> ids;
    adopted.free_nodes = fill(successor, ids);
    return adopted;
}

}  // namespace

TEST(a_lease_ends_once_and_by_its_own_session) {
    for (const std::size_t count : {1u, 2u, 57u, 58u, 59u, 116u, 117u, 1000u}) {
        LeaseFile leases;
        const Entries wanted = entries_from(5, count);
        const LeaseId id = value_of(leases.table.open(7, wanted));
        CHECK(id != 0);
        CHECK_EQUAL(leases.table.count(), 1u);
        Entries visited;
        leases.table.each_entry(id, [&](EntryNumber entry) { visited.push_back(entry); });
        CHECK(visited == wanted);

        Entries none;
        CHECK(!leases.table.close(id, 8, none));
        CHECK(!leases.table.close(0, 7, none));
        CHECK(!leases.table.close(id + 1, 7, none));
        CHECK(!leases.table.close(id + (1ull << 32), 7, none));
        CHECK(!leases.table.close(~0ull, 7, none));
        CHECK(none.empty());
        CHECK(closes_with(leases.table, id, 7, wanted));
        CHECK(!leases.table.close(id, 7, none));
        CHECK_EQUAL(leases.table.count(), 0u);

        const LeaseId next = value_of(leases.table.open(7, wanted));
        CHECK(next != id);
        CHECK(!leases.table.close(id, 7, none));
        CHECK(closes_with(leases.table, next, 7, wanted));
    }
}

TEST(leases_are_listed_by_session) {
    LeaseFile leases;
    const LeaseId a = value_of(leases.table.open(1, entries_from(0, 100)));
    const LeaseId b = value_of(leases.table.open(2, entries_from(0, 1)));
    const LeaseId c = value_of(leases.table.open(1, entries_from(0, 1)));
    std::vector<LeaseId> of_one = leases.table.list(1);
    std::ranges::sort(of_one);
    std::vector<LeaseId> wanted = {a, c};
    std::ranges::sort(wanted);
    CHECK(of_one == wanted);
    CHECK(leases.table.list(2) == std::vector<LeaseId>{b});
    CHECK(leases.table.list(3).empty());
}

TEST(no_room_is_a_fault_that_keeps_nothing) {
    LeaseFile leases;
    const LeaseId large = value_of(leases.table.open(1, entries_from(0, 580)));  // 10 nodes
    std::set<LeaseId> ids;
    CHECK_EQUAL(fill(leases.table, ids), leases.node_limit() - 10);
    CHECK(!leases.table.open(1, entries_from(0, 59)).ok());
    Entries ended;
    CHECK(leases.table.close(*ids.begin(), 99, ended));
    CHECK(!leases.table.open(1, entries_from(0, 59)).ok());  // takes the free one first, and gives it back
    CHECK_EQUAL(fill(leases.table, ids), 1u);
    CHECK(leases.table.close(large, 1, ended));
    CHECK(leases.table.open(1, entries_from(0, 580)).ok());
}

TEST(a_successor_keeps_what_it_is_told_to) {
    LeaseFile leases;
    const Entries many = entries_from(3, 200);
    const LeaseId kept = value_of(leases.table.open(1, many));
    const LeaseId dropped = value_of(leases.table.open(2, entries_from(9, 120)));
    const LeaseId ended = value_of(leases.table.open(1, entries_from(9, 60)));
    Entries none;
    CHECK(leases.table.close(ended, 1, none));

    LeaseTable successor(leases.index.view(), reserve_in(leases.index));
    successor.adopt([](std::uint32_t session, std::span<const EntryNumber>) { return session == 1; });
    CHECK_EQUAL(successor.count(), 1u);
    none.clear();
    CHECK(!successor.close(dropped, 2, none));
    CHECK(!successor.close(ended, 1, none));
    std::set<LeaseId> ids = {kept, dropped, ended};
    CHECK_EQUAL(fill(successor, ids), leases.node_limit() - 4);
    CHECK(closes_with(successor, kept, 1, many));
}

TEST(lists_that_make_no_sense_are_dropped_whole) {
    struct Case {
        std::size_t kept;
        void (*damage)(LeaseNode& first, LeaseNode& second, LeaseNode& other);
    };
    // A lease of two nodes, and one of a single node.
    const std::vector<Case> cases = {
        {2, [](LeaseNode&, LeaseNode&, LeaseNode&) {}},
        {1, [](LeaseNode& first, LeaseNode&, LeaseNode&) { first.id = 0; }},  // died before it was a lease
        {1, [](LeaseNode& first, LeaseNode&, LeaseNode&) { first.next = 3'000'000; }},
        {1, [](LeaseNode& first, LeaseNode&, LeaseNode&) { first.count = 0; }},
        {1, [](LeaseNode& first, LeaseNode&, LeaseNode&) { first.count = 59; }},
        {1, [](LeaseNode&, LeaseNode& second, LeaseNode&) { second.count = 1u << 31; }},
        {1, [](LeaseNode&, LeaseNode& second, LeaseNode&) { second.session = 77; }},
        {1, [](LeaseNode& first, LeaseNode&, LeaseNode&) { first.next = static_cast<std::uint32_t>(first.id); }},
        {1,
         [](LeaseNode& first, LeaseNode& second, LeaseNode&) { second.next = static_cast<std::uint32_t>(first.id); }},
        {1, [](LeaseNode& first, LeaseNode&, LeaseNode&) { first.id = first.id + 1; }},
        {2,
         [](LeaseNode&, LeaseNode& second, LeaseNode& other) { second.id.store(other.id.load()); }},  // means nothing
        {1, [](LeaseNode& first, LeaseNode&, LeaseNode& other) { other.next = first.next; }},  // they share a node
    };
    for (const Case& made_up : cases) {
        LeaseFile leases;
        const LeaseId two = value_of(leases.table.open(1, entries_from(0, 59)));
        const LeaseId one = value_of(leases.table.open(1, entries_from(100, 2)));
        made_up.damage(leases.node(two), leases.node(leases.node(two).next), leases.node(one));
        const Adopted adopted = adopt(leases);
        CHECK_EQUAL(adopted.leases.size(), made_up.kept);
        std::uint32_t nodes = 0;
        for (const auto& [session, entries] : adopted.leases) {
            nodes += static_cast<std::uint32_t>((entries.size() + 57) / 58);
        }
        CHECK_EQUAL(adopted.free_nodes, leases.node_limit() - nodes);
    }
}

TEST(damaged_nodes_lose_no_node_and_share_none) {
    std::mt19937_64 random(11);
    for (int round = 0; round < 300; ++round) {
        LeaseFile leases;
        std::vector<LeaseId> ids;
        for (std::uint32_t i = 0; i < 20; ++i) {
            ids.push_back(value_of(leases.table.open(i % 3, entries_from(i, 1 + random() % 150))));
        }
        const std::uint32_t used = leases.index.view().header->lease_node_count;
        for (int i = 0; i < 6; ++i) {
            // Of the node's head, where its links are.
            auto* const bytes = reinterpret_cast<std::uint8_t*>(&leases.index.view().lease_nodes[random() % used]);
            bytes[random() % 24] = static_cast<std::uint8_t>(random() % 4 == 0 ? random() : random() % used);
        }
        if (round % 3 == 0) {
            leases.index.view().header->lease_node_count = leases.node_limit() * 4;
        }
        const Adopted adopted = adopt(leases);
        CHECK(adopted.leases.size() <= 20);
        CHECK(adopted.free_nodes <= leases.node_limit());
        CHECK(adopted.free_nodes + 60 >= leases.node_limit());
    }
}
