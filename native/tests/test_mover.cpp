#include "disk/mover.hpp"

#include <cstring>
#include <vector>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
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
