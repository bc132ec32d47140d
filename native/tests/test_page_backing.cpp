#include "shim/page_backing.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "check.hpp"
#include "shim/file_descriptor.hpp"
#include "shim/shared_mapping.hpp"

using namespace kvo;

namespace {

constexpr std::size_t kBytes = std::size_t{8} << 20;

struct Backed {
    FileDescriptor file;
    SharedMapping mapping;

    std::byte* start() const { return mapping.start(); }
    std::uint64_t held() const {
        struct stat state{};
        CHECK_EQUAL(fstat(file.number(), &state), 0);
        return static_cast<std::uint64_t>(state.st_blocks) * 512;
    }
    std::size_t resident_pages(std::size_t offset, std::size_t length) const {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        std::vector<unsigned char> states(length / page);
        CHECK_EQUAL(mincore(start() + offset, length, states.data()), 0);
        std::size_t count = 0;
        for (const unsigned char state : states) {
            count += state & 1;
        }
        return count * page;
    }
};

Backed new_backed() {
    Backed backed;
    backed.file = FileDescriptor(memfd_create("backing", MFD_CLOEXEC));
    CHECK_EQUAL(ftruncate(backed.file.number(), kBytes), 0);
    Result<SharedMapping> mapping =
        SharedMapping::map(backed.file.number(), kBytes, kHugePageBytes, Access::read_write, ForkRule::drop);
    CHECK(mapping.ok());
    backed.mapping = std::move(mapping.value());
    return backed;
}

// A byte at the end of every 64 KiB, different each.
void write_marks(std::byte* start) {
    for (std::size_t offset = 0xffff; offset < kBytes; offset += 0x10000) {
        start[offset] = static_cast<std::byte>(offset / 0x10000 + 1);
    }
}

bool has_marks(const std::byte* start) {
    for (std::size_t offset = 0; offset < kBytes; ++offset) {
        const bool is_mark = (offset & 0xffff) == 0xffff;
        if (start[offset] != (is_mark ? static_cast<std::byte>(offset / 0x10000 + 1) : std::byte{0})) {
            return false;
        }
    }
    return true;
}

}  // namespace

TEST(pages_are_given_to_the_range_and_to_nothing_else) {
    const Backed backed = new_backed();
    CHECK_EQUAL(backed.held(), 0u);
    CHECK(allocate_file_pages(backed.file.number(), 1 << 20, 2 << 20).ok());
    CHECK_EQUAL(backed.held(), 2u << 20);
    CHECK(populate_pages(backed.start() + (4 << 20), 1 << 20).ok());
    CHECK_EQUAL(backed.held(), 3u << 20);
    CHECK_EQUAL(backed.resident_pages(4 << 20, 4 << 20), 1u << 20);
    CHECK(allocate_file_pages(backed.file.number(), 0, kBytes).ok());
    CHECK_EQUAL(backed.held(), kBytes);
}

TEST(no_way_of_giving_pages_changes_what_is_there) {
    const Backed backed = new_backed();
    write_marks(backed.start());
    CHECK(allocate_file_pages(backed.file.number(), 0, kBytes).ok());
    CHECK(has_marks(backed.start()));
    touch_pages(backed.start(), kBytes);
    CHECK(has_marks(backed.start()));
    CHECK(populate_pages(backed.start(), kBytes).ok());
    CHECK(has_marks(backed.start()));
    collapse_into_huge_pages(backed.start(), kBytes);
    CHECK(has_marks(backed.start()));
    CHECK_EQUAL(backed.held(), kBytes);
}

TEST(touching_gives_and_maps_every_page) {
    const Backed backed = new_backed();
    CHECK(allocate_file_pages(backed.file.number(), 0, kBytes).ok());
    touch_pages(backed.start(), kBytes);
    CHECK_EQUAL(backed.resident_pages(0, kBytes), kBytes);
    CHECK_EQUAL(backed.held(), kBytes);
}

TEST(collapsing_keeps_to_whole_pieces_of_the_range) {
    const Backed backed = new_backed();
    // One whole piece, from 2 to 4 MiB, lies in this range.
    collapse_into_huge_pages(backed.start() + (1 << 20), (3 << 20) + (1 << 19));
    CHECK(backed.held() <= 2u << 20);
    CHECK_EQUAL(backed.resident_pages(0, 2 << 20), 0u);
    CHECK_EQUAL(backed.resident_pages(4 << 20, 4 << 20), 0u);
    collapse_into_huge_pages(backed.start() + (5 << 20), 2 << 20);  // no whole piece
    CHECK_EQUAL(backed.resident_pages(4 << 20, 4 << 20), 0u);
}

TEST(huge_pages_are_counted_by_mapping) {
    const Backed plain = new_backed();
    CHECK(allocate_file_pages(plain.file.number(), 0, kBytes).ok());
    touch_pages(plain.start(), kBytes);
    const Backed huge = new_backed();
    madvise(huge.start(), kBytes, MADV_HUGEPAGE);
    collapse_into_huge_pages(huge.start(), kBytes);
    const std::uint64_t granted = huge_bytes_mapped(huge.start(), kBytes);
    CHECK_EQUAL(granted % kHugePageBytes, 0u);
    CHECK(granted <= huge.held());
    std::printf("      granted: %llu of %zu bytes\n", static_cast<unsigned long long>(granted), kBytes);
    int on_stack = 0;
    CHECK_EQUAL(huge_bytes_mapped(&on_stack, sizeof on_stack), 0u);
}

TEST(faults_of_the_kernel_are_handed_on) {
    CHECK(allocate_file_pages(-1, 0, 4096).code() == Code::failed);
    const Backed backed = new_backed();
    // The kernel cannot give a page beyond the file's end: a touch would get a signal, this call gets a Status.
    CHECK_EQUAL(ftruncate(backed.file.number(), kBytes / 2), 0);
    CHECK(!populate_pages(backed.start() + kBytes / 2, kBytes / 2).ok());
}

TEST(an_empty_hugetlb_pool_is_a_shortage) {
    const FileDescriptor file(memfd_create("hugetlb", MFD_CLOEXEC | MFD_HUGETLB));
    if (!file.is_open()) {
        std::printf("      skipped: this kernel has no hugetlb memfds\n");
        return;
    }
    constexpr std::uint64_t kMore = std::uint64_t{1} << 40;  // than any pool has
    CHECK_EQUAL(ftruncate(file.number(), static_cast<off_t>(kMore)), 0);
    const Result<SharedMapping> refused =
        SharedMapping::map(file.number(), kMore, kHugePageBytes, Access::read_write, ForkRule::drop);
    CHECK(!refused.ok());
}
