#include "disk/device_reader.hpp"

#include <cstdint>
#include <vector>

#include "check.hpp"
#include "digest/digest_field.hpp"

using namespace kvo;

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr ReadPlanTerms kTerms{2 * kPage, 8 * kPage};

struct Shape {
    std::uint64_t begin, end;
    std::size_t first, last;
    friend bool operator==(const Shape&, const Shape&) = default;
};

std::vector<Shape> shapes(std::vector<WantedRange> ranges, const ReadPlanTerms& terms = kTerms) {
    std::vector<Shape> result;
    for (const PlannedRead& read : plan_reads(ranges, terms)) {
        result.push_back({read.begin / kPage, read.end / kPage, read.first, read.last});
    }
    return result;
}

}  // namespace

TEST(reads_are_whole_blocks) {
    CHECK(shapes({}).empty());
    CHECK(shapes({{0, 4196, 4296, 0}}) == std::vector<Shape>({{1, 2, 0, 1}}));
    CHECK(shapes({{0, 4000, 4200, 0}}) == std::vector<Shape>({{0, 2, 0, 1}}));
}

TEST(neighbours_and_those_across_a_small_gap_are_one_read) {
    CHECK(shapes({{0, 0, 5000, 0}, {0, 5000, 9000, 1}}) == std::vector<Shape>({{0, 3, 0, 2}}));
    CHECK(shapes({{0, 0, kPage, 0}, {0, 3 * kPage, 4 * kPage, 1}}) == std::vector<Shape>({{0, 4, 0, 2}}));
    CHECK(shapes({{0, 0, kPage, 0}, {0, 4 * kPage, 5 * kPage, 1}}) == std::vector<Shape>({{0, 1, 0, 1}, {4, 5, 1, 2}}));
}

TEST(segments_are_apart_and_the_order_is_theirs) {
    std::vector<WantedRange> ranges = {{2, 0, kPage, 0}, {1, 9 * kPage, 10 * kPage, 1}, {1, 0, kPage, 2}};
    const std::vector<PlannedRead> reads = plan_reads(ranges, kTerms);
    CHECK_EQUAL(reads.size(), std::size_t{3});
    CHECK_EQUAL(ranges[0].item, std::uint32_t{2});
    CHECK_EQUAL(reads[2].segment, std::uint32_t{2});
}

TEST(long_stretches_are_cut) {
    CHECK(shapes({{0, 0, 10 * kPage, 0}, {0, 10 * kPage, 17 * kPage, 1}}) ==
          std::vector<Shape>({{0, 8, 0, 1}, {8, 16, 0, 2}, {16, 17, 1, 2}}));
}

TEST(every_byte_is_in_exactly_one_read_of_its_range) {
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
        std::uint64_t state = seed;
        const auto next = [&state](std::uint64_t bound) { return digest_field::mix(state += 77) % bound; };
        std::vector<WantedRange> ranges;
        std::uint64_t at = 0;
        for (std::uint32_t item = 0; item < 40; ++item) {
            at += next(3) == 0 ? next(6 * kPage) : 0;
            const std::uint64_t end = at + 1 + next(12 * kPage);
            ranges.push_back({item / 20, at, end, item});
            at = item == 19 ? 0 : end;
        }
        std::vector<std::uint64_t> covered(ranges.size());
        for (const PlannedRead& read : plan_reads(ranges, kTerms)) {
            CHECK(read.begin % kPage == 0 && read.end % kPage == 0 && read.end - read.begin <= kTerms.piece_bytes);
            for (std::size_t i = read.first; i < read.last; ++i) {
                CHECK_EQUAL(ranges[i].segment, read.segment);
                const std::uint64_t begin = std::max(read.begin, ranges[i].begin);
                const std::uint64_t end = std::min(read.end, ranges[i].end);
                covered[i] += end > begin ? end - begin : 0;
            }
        }
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            CHECK_EQUAL(covered[i], ranges[i].end - ranges[i].begin);
        }
    }
}
