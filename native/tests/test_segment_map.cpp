#include "cache/segment_map.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "check.hpp"

using namespace kvo;

namespace {

constexpr std::uint64_t kSegmentBytes = 1 << 20;

FileDescriptor duplicate(const Segment& segment) { return FileDescriptor(fcntl(segment.file(), F_DUPFD_CLOEXEC, 0)); }

std::vector<Segment> make_segments(std::size_t count) {
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < count; ++i) {
        SegmentWish wish;
        wish.size_bytes = kSegmentBytes;
        wish.huge_pages = HugePages::none;
        segments.push_back(std::move(Segment::create(wish).value()));
        CHECK(segments.back().commit_range(0, kSegmentBytes).ok());
    }
    return segments;
}

std::unique_ptr<SegmentMap> map_of(const std::vector<Segment>& segments) {
    std::vector<FileDescriptor> files;
    for (const Segment& segment : segments) {
        files.push_back(duplicate(segment));
    }
    return std::move(SegmentMap::open(std::move(files), kSegmentBytes).value());
}

}  // namespace

TEST(both_sides_see_the_same_bytes) {
    std::vector<Segment> segments = make_segments(3);
    const auto map = map_of(segments);
    CHECK_EQUAL(map->size_bytes(), 3 * kSegmentBytes);
    const std::vector<std::uint64_t> bases = map->bases();
    for (std::uint64_t i = 0; i < 3; ++i) {
        const std::span<std::byte> record = map->find(i * kSegmentBytes + 100, 50).value();
        CHECK_EQUAL(reinterpret_cast<std::uint64_t>(record.data()), bases[i] + 100);
        std::memset(record.data(), static_cast<int>(i + 1), record.size());
        CHECK(segments[i].bytes()[100] == static_cast<std::byte>(i + 1));
        segments[i].writable_bytes()[149] = std::byte{9};
        CHECK(record[49] == std::byte{9});
    }
}

TEST(bytes_that_no_segment_has_are_refused) {
    const auto map = map_of(make_segments(2));
    CHECK(map->find(kSegmentBytes - 1, 1).ok());
    CHECK(map->find(0, kSegmentBytes).ok());
    for (const auto& [address, length] : {std::pair<std::uint64_t, std::uint64_t>{kSegmentBytes - 1, 2},
                                          {2 * kSegmentBytes, 0},
                                          {0, kSegmentBytes + 1},
                                          {UINT64_MAX, 1},
                                          {kSegmentBytes, UINT64_MAX}}) {
        CHECK(map->find(address, length).fault().code() == Code::invalid);
    }
    const auto none = std::move(SegmentMap::open({}, kSegmentBytes).value());
    CHECK(none->find(0, 1).fault().code() == Code::invalid);
    CHECK(std::move(SegmentMap::open({}, 0).value())->find(5, 0).fault().code() == Code::invalid);
}

TEST(what_is_no_segment_of_this_size_is_refused_by_number) {
    const std::vector<Segment> segments = make_segments(1);
    std::vector<FileDescriptor> files;
    files.push_back(duplicate(segments[0]));
    files.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
    const auto opened = SegmentMap::open(std::move(files), kSegmentBytes);
    CHECK(opened.fault().code() == Code::invalid);
    CHECK(opened.fault().message().starts_with("segment 1: "));
    files.clear();
    files.push_back(duplicate(segments[0]));
    CHECK(SegmentMap::open(std::move(files), 2 * kSegmentBytes).fault().message().starts_with("segment 0: "));
}

TEST(the_bytes_outlive_who_made_them) {
    std::unique_ptr<SegmentMap> map;
    {
        std::vector<Segment> segments = make_segments(1);
        segments[0].writable_bytes()[7] = std::byte{3};
        map = map_of(segments);
    }
    CHECK(map->find(7, 1).value()[0] == std::byte{3});
}
