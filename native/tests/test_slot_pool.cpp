#include "arena/slot_pool.hpp"

#include "check.hpp"

using namespace kvo;

namespace {

constexpr std::uint32_t kSegment = 64;

}  // namespace

TEST(spans_come_and_go_with_their_records) {
    SlotPool pool(kSegment);
    const ClassNumber number = pool.spans.add_class(64, 64, {3, 2});
    CHECK(!pool.allocate(number, 1));
    pool.add_extents(kSegment);
    const Slot first = pool.allocate(number, 1).value();
    const Slot second = pool.allocate(number, 2).value();
    const Slot third = pool.allocate(number, 3).value();
    CHECK(first == (Slot{0, 0}));
    CHECK(second == (Slot{0, 1}));
    CHECK(third == (Slot{3, 0}));
    CHECK_EQUAL(pool.runs.total(), kSegment - 6);
    pool.release(first);
    pool.release(third);
    CHECK_EQUAL(pool.runs.total(), kSegment - 3);
    pool.release(second);
    CHECK_EQUAL(pool.runs.longest(), kSegment);
}

TEST(long_spans_collect_at_the_other_end) {
    SlotPool pool(kSegment);
    pool.add_extents(kSegment);
    const ClassNumber small = pool.spans.add_class(64, 64, {1, 1});
    const ClassNumber large = pool.spans.add_class(128, 128, {24, 1});
    CHECK_EQUAL(pool.allocate(small, 1).value().span, 0u);
    CHECK_EQUAL(pool.allocate(large, 2).value().span, 40u);
    CHECK_EQUAL(pool.allocate(small, 3).value().span, 1u);
    CHECK_EQUAL(pool.allocate(large, 4).value().span, 16u);
    CHECK(!pool.allocate(large, 5));
}

TEST(claims_are_granted_where_they_fit) {
    SlotPool pool(kSegment);
    pool.add_extents(kSegment);
    pool.add_extents(kSegment);
    const ClassNumber two = pool.spans.add_class(64, 64, {2, 3});
    const ClassNumber three = pool.spans.add_class(128, 128, {3, 4});
    const struct {
        ClassNumber number;
        Slot slot;
        Claim answer;
    } table[] = {
        {two, {10, 1}, Claim::granted},     {two, {10, 1}, Claim::taken},
        {two, {10, 2}, Claim::granted},     {two, {10, 3}, Claim::misplaced},    // no such slot
        {three, {10, 0}, Claim::misplaced},                                      // another size is there
        {two, {11, 0}, Claim::misplaced},   {two, {9, 0}, Claim::misplaced},     // reaches into it
        {three, {12, 3}, Claim::granted},   {three, {62, 0}, Claim::misplaced},  // over the segment's end
        {two, {126, 0}, Claim::granted},    {two, {127, 0}, Claim::misplaced},   // over the pool's end
        {two, {128, 0}, Claim::misplaced},  {two, {0xffffffff, 0}, Claim::misplaced},
    };
    EntryNumber owner = 1;
    for (const auto& [number, slot, answer] : table) {
        CHECK(pool.claim(number, slot, owner) == answer);
        CHECK(answer != Claim::granted || pool.spans.owner_at(slot) == owner);
        ++owner;
    }
    CHECK_EQUAL(pool.runs.total(), 2 * kSegment - 7);
    CHECK(pool.allocate(two, 50).value() == (Slot{10, 0}));
}

TEST(a_move_ends_in_one_of_its_places) {
    for (const bool is_finished : {true, false}) {
        SlotPool pool(kSegment);
        pool.add_extents(kSegment);
        const ClassNumber number = pool.spans.add_class(64, 64, {1, 2});
        const Slot from = pool.allocate(number, 5).value();
        const Slot other = pool.allocate(number, 6).value();
        const Slot third = pool.allocate(number, 7).value();
        pool.release(other);
        pool.spans.begin_drain(from.span);
        const Slot to = pool.allocate(number, 5).value();
        CHECK_EQUAL(to.span, third.span);
        pool.begin_move(from, to);
        CHECK(!pool.spans.is_idle(from.span) && !pool.spans.is_idle(to.span));
        pool.end_move(from, to, is_finished ? from : to);
        CHECK(pool.spans.is_idle(to.span));
        CHECK_EQUAL(pool.spans.is_span(from.span), !is_finished);
        CHECK_EQUAL(pool.spans.owner_at(is_finished ? to : from), 5u);
        CHECK_EQUAL(pool.spans.owner_at(is_finished ? from : to), kNoEntry);
        CHECK_EQUAL(pool.runs.total(), is_finished ? kSegment - 1 : kSegment - 2);
    }
}

TEST(a_segment_may_come_in_parts) {
    SlotPool pool(kSegment);
    pool.add_extents(5);
    pool.add_extents(kSegment);
    CHECK_EQUAL(pool.spans.segment_count(), 2u);
    CHECK_EQUAL(pool.runs.total(), kSegment + 5);
    CHECK_EQUAL(pool.runs.longest(), kSegment);  // parts of one segment are one run, two segments are two
    CHECK(!pool.runs.take_at(kSegment + 5, 1));
    pool.add_extents(kSegment - 5);
    CHECK_EQUAL(pool.runs.by_place().size(), 2u);
    CHECK_EQUAL(pool.runs.total(), 2 * kSegment);
}
