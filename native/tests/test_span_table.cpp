#include "arena/span_table.hpp"

#include <random>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::uint64_t kGiB = 1024 * kMiB;

double waste_of(const SpanShape& span, std::uint64_t slot_bytes) {
    const auto bytes = static_cast<double>(span.extents * kMiB);
    return 1 - static_cast<double>(span.slots * slot_bytes) / bytes;
}

}  // namespace

TEST(slots_are_whole_cache_lines_and_then_whole_sectors) {
    const std::uint64_t table[][2] = {{1, 64},
                                      {64, 64},
                                      {65, 128},
                                      {4096, 4096},
                                      {16 * kKiB - 1, 16 * kKiB},
                                      {16 * kKiB, 16 * kKiB},
                                      {16 * kKiB + 1, 16 * kKiB + 512},
                                      {24 * kMiB, 24 * kMiB}};
    for (const auto& [record_bytes, slot_bytes] : table) {
        CHECK_EQUAL(slot_bytes_for(record_bytes), slot_bytes);
    }
}

TEST(spans_are_as_short_as_waste_allows) {
    const struct {
        std::uint64_t slot_bytes;
        SpanShape span;
    } table[] = {
        {64, {1, 16384}},
        {4 * kKiB, {1, 256}},
        {36 * kKiB, {3, 85}},  // one extent would waste 1.6%
        {700 * kKiB, {9, 13}},
        {kMiB, {1, 1}},
        {kMiB + 512, {65, 64}},
        {24 * kMiB, {24, 1}},
        {24 * kMiB - 512 * kKiB, {47, 2}},
        {300 * kMiB, {300, 1}},  // longer than a quarter of the segment: there is no choice
        {299 * kMiB + 512, {300, 1}},
        {kGiB, {1024, 1}},
        {kGiB + 512, {0, 0}},
        {0, {0, 0}},
    };
    for (const auto& [slot_bytes, span] : table) {
        const SpanShape shape = span_shape(slot_bytes, kMiB, kGiB);
        CHECK_EQUAL(shape.extents, span.extents);
        CHECK_EQUAL(shape.slots, span.slots);
    }
}

TEST(a_segment_of_few_extents_bounds_the_span) {
    CHECK(span_shape(700 * kKiB, kMiB, 8 * kMiB) == (SpanShape{1, 1}));
    CHECK(span_shape(700 * kKiB, kMiB, kMiB) == (SpanShape{1, 1}));
}

TEST(records_of_any_size_up_to_a_few_extents_waste_little) {
    std::mt19937_64 random(3);
    for (int i = 0; i < 2000; ++i) {
        const std::uint64_t slot_bytes = slot_bytes_for(1 + random() % (4 * kMiB));
        const SpanShape shape = span_shape(slot_bytes, kMiB, kGiB);
        CHECK(shape.extents >= 1 && shape.extents <= 256 && shape.slots >= 1);
        CHECK(shape.slots * slot_bytes <= shape.extents * kMiB);
        CHECK((shape.slots + 1) * slot_bytes > shape.extents * kMiB);
        CHECK(waste_of(shape, slot_bytes) <= 0.015);
        for (std::uint32_t shorter = 1; shorter < shape.extents; ++shorter) {
            const auto slots = static_cast<std::uint32_t>(shorter * kMiB / slot_bytes);
            CHECK(waste_of({shorter, slots}, slot_bytes) > 0.015);
        }
    }
}

namespace {

constexpr std::uint32_t kSegment = 16;

SpanTable make_table() {
    SpanTable spans(kSegment);
    spans.add_extents(2 * kSegment);
    return spans;
}

std::vector<EntryNumber> owners_of(const SpanTable& spans, ExtentNumber first) {
    std::vector<EntryNumber> owners;
    spans.for_each_live(first, [&](Slot slot, EntryNumber owner) {
        CHECK_EQUAL(spans.owner_at(slot), owner);
        owners.push_back(owner);
        return true;
    });
    return owners;
}

ExtentNumber take_span(SpanTable& spans, ClassNumber number) { return spans.take_hole(number, 1).value().span; }

}  // namespace

TEST(a_new_span_hands_out_its_slots_in_order) {
    for (const std::uint32_t slots : {1u, 31u, 32u, 33u, 64u, 100u}) {
        SpanTable spans = make_table();
        const ClassNumber number = spans.add_class(100, 128, {1, slots});
        CHECK(!spans.take_hole(number, 7));
        spans.add(number, 3);
        for (std::uint32_t i = 0; i < slots; ++i) {
            CHECK(spans.take_hole(number, i).value() == (Slot{3, i}));
        }
        CHECK(!spans.take_hole(number, 7));
        CHECK_EQUAL(owners_of(spans, 3).size(), slots);
        CHECK_EQUAL(spans.mark_of(3).live, slots);
        CHECK_EQUAL(spans.size_class(number).holes, 0u);
        CHECK_EQUAL(spans.size_class(number).live, slots);
        CHECK_EQUAL(spans.segment_live_bytes(0), slots * 128u);
        CHECK_EQUAL(spans.owner_at({3, slots}), kNoEntry);
        CHECK_EQUAL(spans.owner_at({4, 0}), kNoEntry);
        CHECK_EQUAL(spans.owner_at({0xffffffff, 0}), kNoEntry);
    }
}

TEST(the_lowest_hole_is_filled_first) {
    SpanTable spans = make_table();
    const ClassNumber number = spans.add_class(64, 64, {1, 80});
    spans.add(number, 0);
    for (EntryNumber i = 0; i < 80; ++i) {
        spans.take_hole(number, i);
    }
    for (const std::uint32_t index : {70u, 5u, 33u}) {
        spans.put_back({0, index});
        CHECK_EQUAL(spans.owner_at({0, index}), kNoEntry);
    }
    CHECK(!spans.take_at({0, 6}, 100));
    for (const std::uint32_t index : {5u, 33u, 70u}) {
        CHECK(spans.take_hole(number, 200 + index).value() == (Slot{0, index}));
        CHECK_EQUAL(spans.owner_at({0, index}), 200 + index);
    }
}

TEST(the_fullest_span_is_filled_and_the_sparsest_is_drained) {
    SpanTable spans = make_table();
    const ClassNumber number = spans.add_class(64, 64, {1, 64});
    const auto any = [](ExtentNumber) { return true; };
    CHECK(!spans.sparsest(number, any));
    const std::uint32_t live[] = {20, 60, 40, 64, 3};
    for (ExtentNumber first = 0; first < 5; ++first) {
        spans.add(number, first);
        for (std::uint32_t i = 0; i < live[first]; ++i) {
            CHECK(spans.take_at({first, i}, i));
        }
    }
    CHECK_EQUAL(spans.size_class(number).holes, 5u * 64 - 187);
    CHECK_EQUAL(spans.size_class(number).spare_spans, 2u);
    CHECK_EQUAL(spans.spare_extents(), 2u);
    CHECK_EQUAL(spans.sparsest(number, any).value(), 4u);
    CHECK_EQUAL(spans.sparsest(number, [](ExtentNumber first) { return first != 4; }).value(), 0u);
    for (int i = 0; i < 4; ++i) {
        CHECK_EQUAL(take_span(spans, number), 1u);
    }
    for (int i = 0; i < 24; ++i) {
        CHECK_EQUAL(take_span(spans, number), 2u);
    }
    CHECK_EQUAL(take_span(spans, number), 0u);
}

TEST(a_span_being_drained_takes_no_record) {
    SpanTable spans = make_table();
    const ClassNumber number = spans.add_class(64, 64, {2, 4});
    spans.add(number, 0);
    spans.add(number, 4);
    CHECK(spans.take_at({0, 2}, 11));
    CHECK(spans.take_at({4, 0}, 12));
    CHECK_EQUAL(spans.spare_extents(), 2u);
    spans.begin_drain(4);
    CHECK(!spans.is_idle(4));
    CHECK_EQUAL(spans.spare_extents(), 0u);
    CHECK_EQUAL(spans.size_class(number).holes, 3u);
    spans.begin_move(4);
    CHECK(!spans.settle(4));
    for (int i = 0; i < 3; ++i) {
        CHECK_EQUAL(take_span(spans, number), 0u);
    }
    CHECK(!spans.take_hole(number, 1));

    spans.end_move(4);
    CHECK(!spans.settle(4));  // it kept its record: back in use
    CHECK(spans.is_idle(4));
    CHECK_EQUAL(take_span(spans, number), 4u);

    spans.begin_drain(4);
    spans.put_back({4, 0});
    CHECK(!spans.settle(4));
    spans.begin_drain(4);
    spans.put_back({4, 1});
    CHECK(spans.settle(4));
    CHECK_EQUAL(spans.remove(4), 2u);
    CHECK(!spans.is_span(4));
    CHECK_EQUAL(spans.size_class(number).spans, 1u);
    CHECK_EQUAL(spans.size_class(number).holes, 0u);
}

TEST(some_holes_of_a_size_are_not_spare) {
    SpanTable spans(2048);
    spans.add_extents(2048);
    const ClassNumber number = spans.add_class(64, 64, {1, 64});
    for (ExtentNumber first = 0; first < 640; ++first) {
        spans.add(number, first);
        for (std::uint32_t i = 0; i < 64; ++i) {
            spans.take_at({first, i}, 1);
        }
    }
    // One slot in 64 may be a hole, 640 in all.
    for (ExtentNumber hole = 0; hole < 640 + 64; ++hole) {
        CHECK_EQUAL(spans.spare_extents(), 0u);
        spans.put_back({hole % 640, hole / 640});
    }
    CHECK_EQUAL(spans.spare_extents(), 1u);
    spans.take_at({0, 0}, 1);
    CHECK_EQUAL(spans.spare_extents(), 0u);
}
