#include "evict/entry_lists.hpp"

#include <algorithm>
#include <random>

#include "check.hpp"

using namespace kvo;

TEST(an_array_keeps_its_items_where_they_are) {
    ChunkedArray<std::uint64_t> array;
    std::uint64_t& first = array.grow_to(0);
    first = 7;
    array.grow_to(1'000'000) = 9;
    CHECK_EQUAL(&first, &array[0]);
    CHECK_EQUAL(array[0], 7U);
    CHECK_EQUAL(array[1'000'000], 9U);
    CHECK_EQUAL(array[999'999], 0U);
    // Grown by chunks, not by doubling.
    CHECK(array.size() < 1'020'000);
}

TEST(nothing_is_known_before_it_is_added) {
    EntryLists<2> lists;
    CHECK(!lists.knows(0));
    CHECK(!lists.knows(kNoEntry));
    lists.add(70'000, 1, 5, 6);
    CHECK(lists.knows(70'000));
    CHECK(!lists.knows(69'999));
    lists.set_mark(70'000, 3);
    lists.remove(70'000);
    CHECK(!lists.knows(70'000));
    lists.add(70'000, 0, 8, 9);
    CHECK_EQUAL(lists.mark(70'000), std::uint8_t{0});
    CHECK_EQUAL(lists.name(70'000), 8U);
    CHECK_EQUAL(lists.size_bytes(70'000), 9U);
}

TEST(agrees_with_plain_vectors) {
    std::mt19937 random(1);
    EntryLists<3> lists;
    std::vector<EntryNumber> model[3];  // newest first
    const auto list_of = [&](EntryNumber entry) {
        for (std::size_t list = 0; list < 3; ++list) {
            if (std::ranges::find(model[list], entry) != model[list].end()) {
                return list;
            }
        }
        return std::size_t{3};
    };
    for (int step = 0; step < 50'000; ++step) {
        const auto entry = static_cast<EntryNumber>(random() % 50);
        const auto other = static_cast<EntryNumber>(random() % 50);
        const std::size_t list = random() % 3;
        const std::size_t now = list_of(entry);
        CHECK_EQUAL(lists.knows(entry), now < 3);
        if (now == 3 && list_of(other) < 3 && random() % 2 == 0) {
            auto& queue = model[list_of(other)];
            queue.insert(std::ranges::find(queue, other) + 1, entry);
            lists.add_behind(other, entry, entry, entry + 1);
        } else if (now == 3) {
            model[list].insert(model[list].begin(), entry);
            lists.add(entry, list, entry, entry + 1);
        } else {
            CHECK_EQUAL(lists.list_of(entry), now);
            std::erase(model[now], entry);
            if (random() % 3 == 0) {
                lists.remove(entry);
            } else {
                model[list].insert(model[list].begin(), entry);
                lists.move(entry, list);
            }
        }
        for (std::size_t at = 0; at < 3; ++at) {
            std::uint64_t bytes = 0;
            for (const EntryNumber member : model[at]) {
                bytes += member + 1;
            }
            CHECK_EQUAL(lists.oldest(at), model[at].empty() ? kNoEntry : model[at].back());
            CHECK_EQUAL(lists.bytes(at), bytes);
            CHECK_EQUAL(lists.count(at), model[at].size());
        }
    }
}
