#include "arena/span_shape.hpp"

#include <random>

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
