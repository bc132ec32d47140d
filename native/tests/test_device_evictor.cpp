#include "disk/device_evictor.hpp"

#include <cstring>
#include <vector>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;

namespace {

std::uint32_t choose(std::vector<Candidate> candidates) { return choose_victim(candidates)->segment; }

}  // namespace

TEST(without_candidates_there_is_no_victim) { CHECK(!choose_victim({})); }

TEST(of_equals_the_oldest_goes) {
    CHECK_EQUAL(choose({{1, 30, 100, 0}, {2, 10, 100, 0}, {3, 20, 100, 0}}), std::uint32_t{2});
    CHECK_EQUAL(choose({{7, 1, 100, 100}}), std::uint32_t{7});
}

TEST(what_is_dead_goes_before_what_lives) {
    CHECK_EQUAL(choose({{1, 1, 100, 0}, {2, 2, 10, 0}, {3, 3, 100, 0}, {4, 4, 100, 0}}), std::uint32_t{2});
}

TEST(hot_bytes_count_more_than_live_ones) {
    CHECK_EQUAL(choose({{1, 1, 100, 80}, {2, 2, 100, 0}, {3, 3, 100, 0}, {4, 4, 100, 0}}), std::uint32_t{2});
}

TEST(age_wears_heat_out) {
    // The same segment, long after: its few hot bytes are worth less than the room it takes.
    CHECK_EQUAL(choose({{1, 1, 100, 10}, {2, 50, 100, 0}, {3, 51, 100, 0}, {4, 52, 100, 0}}), std::uint32_t{1});
}

TEST(the_newer_half_is_left_alone) {
    CHECK_EQUAL(choose({{1, 1, 100, 100}, {2, 2, 100, 100}, {3, 3, 0, 0}, {4, 4, 0, 0}}), std::uint32_t{1});
}

TEST(moves_are_a_share_of_what_is_put) {
    MoveAllowance allowance(0.1, 50);
    CHECK(!allowance.take(1));
    allowance.add_put(100);
    CHECK(!allowance.take(11));
    CHECK(allowance.take(10));
    CHECK(!allowance.take(1));
    allowance.add_put(100000);  // up to the limit
    CHECK(!allowance.take(51));
    CHECK(allowance.take(50));
}

using namespace kvo::test;

namespace {

FooterEntry entry(std::uint64_t number, std::uint64_t length, RecordFlag flag = RecordFlag::none) {
    FooterEntry one;
    one.key = key_of(number);
    one.length = length;
    one.flag = flag;
    return one;
}

}  // namespace

TEST(what_is_read_is_put_again_a_part_at_a_time) {
    std::vector<BatchPointer> gets, puts, removals;
    const auto into = [](std::vector<BatchPointer>& list) {
        return [&list](const BatchPointer& batch) { list.push_back(batch); };
    };
    Mover mover({entry(1, 3 << 20), entry(2, 1 << 20), entry(3, 1 << 20), entry(4, 0, RecordFlag::removal)}, into(gets),
                into(puts), into(removals), [] { return soon(); });
    CHECK(!mover.step());
    CHECK_EQUAL(gets.size(), std::size_t{1});
    CHECK_EQUAL(gets[0]->size(), std::size_t{2});  // 4 MiB at a time
    CHECK(gets[0]->is_move);
    CHECK(!mover.step());
    CHECK(puts.empty());  // it waits for the read
    gets[0]->item(0).digest = 77;
    gets[0]->end(0, DiskOutcome::found);
    gets[0]->end(1, DiskOutcome::damaged);
    CHECK(!mover.step());
    CHECK_EQUAL(puts.size(), std::size_t{1});
    CHECK_EQUAL(puts[0]->size(), std::size_t{1});
    CHECK(puts[0]->item(0).key == key_of(1));
    CHECK_EQUAL(puts[0]->item(0).digest, std::uint64_t{77});
    CHECK(puts[0]->item(0).address == gets[0]->item(0).address);
    CHECK(!mover.step());
    CHECK_EQUAL(gets.size(), std::size_t{1});  // and for the write
    puts[0]->end(0, DiskOutcome::written);
    CHECK(!mover.step());
    gets[1]->end(0, DiskOutcome::missing);  // nothing is left of this part
    CHECK(!mover.step());
    CHECK_EQUAL(puts.size(), std::size_t{1});
    CHECK_EQUAL(removals.size(), std::size_t{1});
    CHECK(removals[0]->verb == DiskVerb::remove && removals[0]->is_move);
    removals[0]->end(0, DiskOutcome::removed);
    CHECK(mover.step());
    CHECK_EQUAL(mover.moved_bytes(), std::uint64_t{3 << 20});
}

TEST(the_memory_lives_as_long_as_its_batch) {
    BatchPointer get;
    {
        Mover mover({entry(1, 100)}, [&get](const BatchPointer& batch) { get = batch; }, {}, {}, [] { return soon(); });
        CHECK(!mover.step());
    }
    std::memset(get->item(0).address, 1, 100);  // as a read that was under way when the device gave up
    get->end(0, DiskOutcome::found);
}
