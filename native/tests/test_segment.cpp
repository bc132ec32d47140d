#include "arena/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "check.hpp"
#include "child_process.hpp"
#include "made_up_files.hpp"
#include "shim/shared_mapping.hpp"

using namespace kvo;
using test::ChildProcess;
using test::Line;
using test::MadeUpFiles;

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kSize = 8 * kMiB;

Segment new_segment(std::uint64_t size = kSize, HugePages huge_pages = HugePages::none) {
    SegmentWish wish;
    wish.size_bytes = size;
    wish.huge_pages = huge_pages;
    Result<Segment> segment = Segment::create(wish);
    CHECK(segment.ok());
    return std::move(segment.value());
}

FileDescriptor duplicate(int file) { return FileDescriptor(fcntl(file, F_DUPFD_CLOEXEC, 0)); }

AdoptionTerms terms_for(std::uint64_t size, Access access = Access::read_write) {
    AdoptionTerms terms;
    terms.size_bytes = size;
    terms.access = access;
    return terms;
}

bool is_zero(std::span<const std::byte> bytes) {
    return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

TEST(a_new_segment_is_sealed_private_and_empty) {
    Segment segment = new_segment();
    CHECK_EQUAL(segment.size_bytes(), kSize);
    CHECK_EQUAL(segment.held_bytes(), 0u);
    CHECK_EQUAL(fcntl(segment.file(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    constexpr int kExpected = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    CHECK_EQUAL(fcntl(segment.file(), F_GET_SEALS) & kExpected, kExpected);
    CHECK_EQUAL(ftruncate(segment.file(), static_cast<off_t>(kSize / 2)), -1);
    CHECK_EQUAL(ftruncate(segment.file(), static_cast<off_t>(kSize * 2)), -1);
    CHECK_EQUAL(fcntl(segment.file(), F_ADD_SEALS, F_SEAL_WRITE), -1);
    struct stat state{};
    CHECK_EQUAL(fstat(segment.file(), &state), 0);
    CHECK_EQUAL(state.st_mode & 0777u, 0600u);
    CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(segment.bytes().data()) % kHugePageBytes, 0u);
    CHECK(is_zero(segment.bytes()));
}

TEST(sizes_that_cannot_be_are_refused) {
    for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1}, kMiB + 1, UINT64_MAX - 4095}) {
        SegmentWish wish;
        wish.size_bytes = size;
        CHECK(Segment::create(wish).fault().code() == Code::invalid);
    }
}

TEST(a_file_size_limit_is_a_status_and_no_signal) {
    ChildProcess child([](const Line&) {
        signal(SIGXFSZ, SIG_DFL);
        const rlimit limit{kMiB, kMiB};
        setrlimit(RLIMIT_FSIZE, &limit);
        SegmentWish wish;
        wish.size_bytes = kSize;
        const Result<Segment> refused = Segment::create(wish);
        wish.size_bytes = kMiB;
        const bool is_named = refused.fault().message().find("ulimit -f") != std::string::npos;
        return refused.fault().code() == Code::unavailable && is_named && Segment::create(wish).ok() ? 0 : 1;
    });
    CHECK_EQUAL(child.wait_exit(), 0);
}

TEST(committing_takes_whole_pages_and_keeps_what_is_there) {
    for (const HugePages huge_pages : {HugePages::none, HugePages::transparent}) {
        Segment segment = new_segment(kSize, huge_pages);
        const std::uint64_t page = segment.page_bytes();
        CHECK(segment.commit_range(3 * page + 1, page).ok());
        CHECK_EQUAL(segment.held_bytes(), 2 * page);
        segment.writable_bytes()[3 * page] = std::byte{9};
        CHECK(segment.commit_range(0, 3 * kMiB).ok());
        CHECK_EQUAL(segment.held_bytes(), 3 * kMiB);
        CHECK(segment.commit_range(0, kSize).ok());
        CHECK_EQUAL(segment.held_bytes(), kSize);
        CHECK(segment.commit_range(kSize, 0).ok());
        CHECK(segment.bytes()[3 * page] == std::byte{9});
        segment.writable_bytes()[3 * page] = std::byte{0};
        CHECK(is_zero(segment.bytes()));
    }
}

TEST(ranges_outside_are_refused) {
    Segment segment = new_segment();
    for (const auto& [offset, length] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
             {0, kSize + 1}, {kSize, 1}, {kSize + 1, 0}, {UINT64_MAX, 2}, {4096, UINT64_MAX}}) {
        CHECK(segment.commit_range(offset, length).code() == Code::invalid);
    }
    CHECK_EQUAL(segment.held_bytes(), 0u);
}

TEST(a_sparse_segment_of_64_gib_grows_step_by_step) {
    constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
    Segment segment = new_segment(64 * kGiB);
    std::uint64_t held = 0;
    for (const std::uint64_t offset : {std::uint64_t{0}, kGiB, 63 * kGiB, 64 * kGiB - kMiB}) {
        CHECK(segment.commit_range(offset, kMiB).ok());
        segment.writable_bytes()[offset + kMiB - 1] = std::byte{1};
        held += kMiB;
        CHECK_EQUAL(segment.held_bytes(), held);
    }
    CHECK_EQUAL(segment.size_bytes(), 64 * kGiB);
}

TEST(a_shortage_is_refused_before_anything_is_taken) {
    Segment segment = new_segment();
    const MadeUpFiles proc("segment_short");
    CommitTerms terms;
    terms.proc = proc.root();

    proc.write_available(2 * kMiB);
    CHECK(segment.commit_range(0, kMiB, terms).ok());
    const Status refused = segment.commit_range(0, 3 * kMiB, terms);
    CHECK(refused.code() == Code::unavailable);
    CHECK(refused.message().find("MemAvailable") != std::string::npos);
    CHECK_EQUAL(segment.held_bytes(), kMiB);

    terms.committers = 3;
    CHECK(!segment.commit_range(kMiB, kMiB, terms).ok());
    terms.committers = 1;
    terms.keep_free_bytes = kMiB + 4096;
    CHECK(!segment.commit_range(kMiB, kMiB, terms).ok());
    terms.keep_free_bytes = kMiB;
    CHECK(segment.commit_range(kMiB, kMiB, terms).ok());

    CHECK(segment.commit_range(0, kSize).ok());
    proc.write_available(0);
    terms.keep_free_bytes = 0;
    CHECK(segment.commit_range(0, kSize, terms).ok());  // nothing is missing any more
}

TEST(another_process_adopts_what_it_was_sent) {
    Segment segment = new_segment();
    CHECK(segment.commit_range(0, kSize).ok());
    segment.writable_bytes()[kSize - 1] = std::byte{5};
    ChildProcess child([file = segment.file()](const Line&) {
        Result<Segment> adopted = Segment::adopt(FileDescriptor(file), terms_for(kSize));
        if (!adopted.ok() || adopted.value().bytes()[kSize - 1] != std::byte{5}) {
            return 1;
        }
        adopted.value().writable_bytes()[0] = std::byte{6};
        return adopted.value().commit_range(0, kSize).ok() && adopted.value().held_bytes() == kSize ? 0 : 2;
    });
    CHECK_EQUAL(child.wait_exit(), 0);
    CHECK(segment.bytes()[0] == std::byte{6});
}

TEST(memory_outlives_the_segment_that_made_it) {
    FileDescriptor kept;
    {
        Segment segment = new_segment();
        CHECK(segment.commit_range(0, kMiB).ok());
        segment.writable_bytes()[77] = std::byte{7};
        kept = duplicate(segment.file());
    }
    const Result<Segment> adopted = Segment::adopt(std::move(kept), terms_for(kSize));
    CHECK(adopted.ok());
    CHECK(adopted.value().bytes()[77] == std::byte{7});
    CHECK_EQUAL(adopted.value().held_bytes(), kMiB);
}

TEST(a_read_only_descriptor_cannot_be_mapped_for_writing) {
    Segment segment = new_segment();
    CHECK(segment.commit_range(0, kSize).ok());
    segment.writable_bytes()[1] = std::byte{8};
    Result<FileDescriptor> file = segment.open_read_only();
    CHECK(file.ok());
    CHECK_EQUAL(fcntl(file.value().number(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    CHECK(Segment::adopt(duplicate(file.value().number()), terms_for(kSize)).fault().code() == Code::failed);
    Result<Segment> reader = Segment::adopt(std::move(file.value()), terms_for(kSize, Access::read_only));
    CHECK(reader.ok());
    CHECK(reader.value().bytes()[1] == std::byte{8});
    CHECK(reader.value().writable_bytes().empty());
    CHECK(reader.value().commit_range(0, kMiB).code() == Code::invalid);
    CHECK(mprotect(const_cast<std::byte*>(reader.value().bytes().data()), kSize, PROT_READ | PROT_WRITE) != 0);
}

TEST(a_successor_of_the_same_user_may_write_again) {
    Segment segment = new_segment();
    AdoptionTerms terms = terms_for(kSize);
    terms.is_own = true;
    Result<Segment> adopted = Segment::adopt(std::move(segment.open_read_only().value()), terms);
    CHECK(adopted.ok());
    CHECK(adopted.value().commit_range(0, kMiB).ok());
    adopted.value().writable_bytes()[1] = std::byte{9};
    CHECK(segment.bytes()[1] == std::byte{9});

    // Nothing is opened that is no memfd: of a device or a pipe that alone may do something.
    CHECK(Segment::adopt(FileDescriptor(open("/dev/null", O_RDONLY)), terms).fault().code() == Code::invalid);
    if (geteuid() == 0) {
        CHECK_EQUAL(fchown(segment.file(), 65534, static_cast<gid_t>(-1)), 0);
        const Result<Segment> forged = Segment::adopt(duplicate(segment.file()), terms);
        CHECK(forged.fault().code() == Code::invalid);
        CHECK(forged.fault().message().find("65534") != std::string::npos);
    }
}

TEST(what_is_not_a_sealed_segment_of_the_size_is_not_adopted) {
    Segment segment = new_segment();
    CHECK(Segment::adopt(duplicate(segment.file()), terms_for(kSize / 2)).fault().code() == Code::invalid);
    CHECK(Segment::adopt(duplicate(segment.file()), terms_for(0)).fault().code() == Code::invalid);
    CHECK(Segment::adopt(FileDescriptor(), terms_for(kSize)).fault().code() == Code::invalid);
    CHECK(Segment::adopt(FileDescriptor(open("/proc/self/exe", O_RDONLY)), terms_for(kSize)).fault().code() ==
          Code::invalid);

    constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    for (const int lacking : {0, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL}) {
        FileDescriptor file(memfd_create("other", MFD_ALLOW_SEALING));
        CHECK_EQUAL(ftruncate(file.number(), static_cast<off_t>(kSize)), 0);
        CHECK_EQUAL(fcntl(file.number(), F_ADD_SEALS, kAll & ~lacking), 0);
        const Result<Segment> adopted = Segment::adopt(std::move(file), terms_for(kSize));
        CHECK_EQUAL(adopted.ok(), lacking == 0);
        if (adopted.ok()) {
            CHECK_EQUAL(fcntl(adopted.value().file(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        } else {
            CHECK(adopted.fault().code() == Code::invalid);
        }
    }
}

TEST(segments_move_and_their_bytes_stay_in_place) {
    Segment first = new_segment();
    Segment second = new_segment();
    const std::byte* const start = second.bytes().data();
    const int file = second.file();
    first = std::move(second);
    CHECK(first.bytes().data() == start);
    CHECK_EQUAL(first.file(), file);
    CHECK(first.commit_range(0, kMiB).ok());
}

TEST(a_hugetlb_wish_that_is_not_granted_says_why_and_goes_on) {
    SegmentWish wish;
    wish.huge_pages = HugePages::hugetlb_2m;
    wish.size_bytes = 3 * kMiB;  // no multiple of the huge page
    Result<Segment> odd = Segment::create(wish);
    CHECK(odd.ok());
    CHECK(!odd.value().is_hugetlb());
    CHECK(odd.value().refused().find("no multiple") != std::string::npos);

    for (const HugePages huge_pages : {HugePages::hugetlb_2m, HugePages::hugetlb_1g}) {
        wish.huge_pages = huge_pages;
        wish.size_bytes = std::uint64_t{1} << 38;  // more than pools have
        Result<Segment> large = Segment::create(wish);
        CHECK_EQUAL(large.ok() ? "" : large.fault().message(), "");
        CHECK(!large.value().is_hugetlb());
        CHECK(large.value().refused().find("hugetlb pages of") != std::string::npos);
        CHECK(large.value().commit_range(0, kMiB).ok());
        CHECK_EQUAL(large.value().page_bytes(), static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)));
    }
}

TEST(a_hugetlb_segment_is_committed_and_adopted_like_others) {
    SegmentWish wish;
    wish.huge_pages = HugePages::hugetlb_2m;
    wish.size_bytes = 4 * kMiB;
    Result<Segment> segment = Segment::create(wish);
    CHECK(segment.ok());
    if (!segment.value().is_hugetlb()) {
        std::printf("      skipped: %s\n", segment.value().refused().c_str());
        return;
    }
    CHECK_EQUAL(segment.value().page_bytes(), 2 * kMiB);
    CHECK(segment.value().commit_range(0, wish.size_bytes).ok());
    CHECK_EQUAL(segment.value().held_bytes(), wish.size_bytes);
    CHECK_EQUAL(segment.value().huge_bytes(), wish.size_bytes);
    const Result<Segment> adopted = Segment::adopt(duplicate(segment.value().file()), terms_for(wish.size_bytes));
    CHECK(adopted.ok());
    CHECK(adopted.value().is_hugetlb());
}

TEST(transparent_huge_pages_are_reported_as_granted) {
    Segment plain = new_segment(kSize, HugePages::none);
    CHECK(plain.commit_range(0, kSize).ok());
    Segment huge = new_segment(kSize, HugePages::transparent);
    CHECK(huge.commit_range(0, kSize).ok());
    CHECK_EQUAL(huge.huge_bytes() % kHugePageBytes, 0u);
    CHECK(huge.huge_bytes() <= kSize);
    std::printf("      granted: %llu of %llu bytes; %s\n", static_cast<unsigned long long>(huge.huge_bytes()),
                static_cast<unsigned long long>(kSize), huge.refused().c_str());
}

TEST(a_placement_that_cannot_be_is_a_fault_and_one_node_is_a_reason) {
    SegmentWish wish;
    wish.size_bytes = kSize;
    wish.placement = {Placement::one_node, 1000};
    const Result<Segment> nowhere = Segment::create(wish);
    wish.placement = {Placement::interleave, 0};
    const Result<Segment> interleaved = Segment::create(wish);
    CHECK(interleaved.ok());
    // Where the kernel does not tell the nodes, nothing can be refused.
    CHECK(nowhere.ok() ? !nowhere.value().refused().empty() : nowhere.fault().code() == Code::invalid);
}

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
