#include "shim/shared_mapping.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "check.hpp"
#include "child_process.hpp"
#include "shim/file_descriptor.hpp"

using namespace kvo;
using test::ChildProcess;
using test::Line;

namespace {

constexpr std::size_t kBytes = 1 << 16;

FileDescriptor new_file() {
    FileDescriptor file(memfd_create("mapping", MFD_CLOEXEC));
    CHECK(file.is_open());
    CHECK_EQUAL(ftruncate(file.number(), kBytes), 0);
    return file;
}

// Without a sanitizer's handler, which would end the child by other means than the signal.
void die_of_faults() { signal(SIGSEGV, SIG_DFL); }

bool is_mapped(const void* address) { return msync(const_cast<void*>(address), kBytes, MS_ASYNC) == 0; }

}  // namespace

TEST(the_start_is_aligned_as_asked) {
    const FileDescriptor file = new_file();
    for (const std::size_t alignment : {std::size_t{1} << 12, std::size_t{1} << 21, std::size_t{1} << 30}) {
        const Result<SharedMapping> mapping =
            SharedMapping::map(file.number(), kBytes, alignment, Access::read_write, ForkRule::drop);
        CHECK(mapping.ok());
        CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(mapping.value().start()) % alignment, 0u);
        CHECK_EQUAL(mapping.value().size(), kBytes);
    }
}

TEST(two_mappings_of_a_file_show_the_same_bytes) {
    const FileDescriptor file = new_file();
    const Result<SharedMapping> writer =
        SharedMapping::map(file.number(), kBytes, 4096, Access::read_write, ForkRule::drop);
    const Result<SharedMapping> reader =
        SharedMapping::map(file.number(), kBytes, 4096, Access::read_only, ForkRule::drop);
    CHECK(writer.ok() && reader.ok());
    writer.value().start()[kBytes - 1] = std::byte{7};
    CHECK(reader.value().start()[kBytes - 1] == std::byte{7});
    ChildProcess child([&reader](const Line&) {
        die_of_faults();
        Result<SharedMapping>& mapping = const_cast<Result<SharedMapping>&>(reader);
        mapping.value().start()[0] = std::byte{1};
        return 0;
    });
    CHECK_EQUAL(child.wait_exit(), -SIGSEGV);
}

TEST(the_mapping_moves_and_ends_with_its_owner) {
    const FileDescriptor file = new_file();
    Result<SharedMapping> first = SharedMapping::map(file.number(), kBytes, 4096, Access::read_write, ForkRule::drop);
    Result<SharedMapping> second = SharedMapping::map(file.number(), kBytes, 4096, Access::read_write, ForkRule::drop);
    const void* const first_start = first.value().start();
    const void* const second_start = second.value().start();
    first.value() = std::move(second.value());
    CHECK(first.value().start() == second_start);
    CHECK(!is_mapped(first_start));
    CHECK(is_mapped(second_start));
    {
        const SharedMapping last = std::move(first.value());
    }
    CHECK(!is_mapped(second_start));
}

TEST(a_forked_child_dies_of_a_dropped_mapping_and_reads_a_kept_one) {
    const FileDescriptor file = new_file();
    for (const ForkRule rule : {ForkRule::drop, ForkRule::keep}) {
        const Result<SharedMapping> mapping = SharedMapping::map(file.number(), kBytes, 4096, Access::read_write, rule);
        CHECK(mapping.ok());
        mapping.value().start()[0] = std::byte{42};
        ChildProcess child([&mapping](const Line&) {
            die_of_faults();
            return static_cast<int>(mapping.value().start()[0]);
        });
        CHECK_EQUAL(child.wait_exit(), rule == ForkRule::keep ? 42 : -SIGSEGV);
        CHECK(mapping.value().start()[0] == std::byte{42});
    }
}

TEST(a_child_does_not_unmap_what_it_put_in_the_place_of_a_dropped_mapping) {
    const FileDescriptor file = new_file();
    Result<SharedMapping> mapping = SharedMapping::map(file.number(), kBytes, 4096, Access::read_write, ForkRule::drop);
    ChildProcess child([&mapping](const Line&) {
        void* const start = mapping.value().start();
        void* const other =
            mmap(start, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        {
            const SharedMapping gone = std::move(mapping.value());
        }
        return other == start && is_mapped(start) ? 0 : 1;
    });
    CHECK_EQUAL(child.wait_exit(), 0);
}

TEST(what_cannot_be_mapped_is_a_fault) {
    CHECK(SharedMapping::map(-1, kBytes, 4096, Access::read_only, ForkRule::drop).fault().code() == Code::failed);
    const FileDescriptor file = new_file();
    const Result<SharedMapping> huge =
        SharedMapping::map(file.number(), std::size_t{1} << 62, 4096, Access::read_only, ForkRule::drop);
    CHECK(huge.fault().message().find("address space") != std::string::npos);
}

namespace {

constexpr std::size_t kBackedBytes = std::size_t{8} << 20;

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
    CHECK_EQUAL(ftruncate(backed.file.number(), kBackedBytes), 0);
    Result<SharedMapping> mapping =
        SharedMapping::map(backed.file.number(), kBackedBytes, kHugePageBytes, Access::read_write, ForkRule::drop);
    CHECK(mapping.ok());
    backed.mapping = std::move(mapping.value());
    return backed;
}

// A byte at the end of every 64 KiB, different each.
void write_marks(std::byte* start) {
    for (std::size_t offset = 0xffff; offset < kBackedBytes; offset += 0x10000) {
        start[offset] = static_cast<std::byte>(offset / 0x10000 + 1);
    }
}

bool has_marks(const std::byte* start) {
    for (std::size_t offset = 0; offset < kBackedBytes; ++offset) {
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
    CHECK(allocate_file_pages(backed.file.number(), 0, kBackedBytes).ok());
    CHECK_EQUAL(backed.held(), kBackedBytes);
}

TEST(no_way_of_giving_pages_changes_what_is_there) {
    const Backed backed = new_backed();
    write_marks(backed.start());
    CHECK(allocate_file_pages(backed.file.number(), 0, kBackedBytes).ok());
    CHECK(has_marks(backed.start()));
    touch_pages(backed.start(), kBackedBytes);
    CHECK(has_marks(backed.start()));
    CHECK(populate_pages(backed.start(), kBackedBytes).ok());
    CHECK(has_marks(backed.start()));
    collapse_into_huge_pages(backed.start(), kBackedBytes);
    CHECK(has_marks(backed.start()));
    CHECK_EQUAL(backed.held(), kBackedBytes);
}

TEST(touching_gives_and_maps_every_page) {
    const Backed backed = new_backed();
    CHECK(allocate_file_pages(backed.file.number(), 0, kBackedBytes).ok());
    touch_pages(backed.start(), kBackedBytes);
    CHECK_EQUAL(backed.resident_pages(0, kBackedBytes), kBackedBytes);
    CHECK_EQUAL(backed.held(), kBackedBytes);
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
    CHECK(allocate_file_pages(plain.file.number(), 0, kBackedBytes).ok());
    touch_pages(plain.start(), kBackedBytes);
    const Backed huge = new_backed();
    madvise(huge.start(), kBackedBytes, MADV_HUGEPAGE);
    collapse_into_huge_pages(huge.start(), kBackedBytes);
    const std::uint64_t granted = huge_bytes_mapped(huge.start(), kBackedBytes);
    CHECK_EQUAL(granted % kHugePageBytes, 0u);
    CHECK(granted <= huge.held());
    std::printf("      granted: %llu of %zu bytes\n", static_cast<unsigned long long>(granted), kBackedBytes);
    int on_stack = 0;
    CHECK_EQUAL(huge_bytes_mapped(&on_stack, sizeof on_stack), 0u);
}

TEST(faults_of_the_kernel_are_handed_on) {
    CHECK(allocate_file_pages(-1, 0, 4096).code() == Code::failed);
    const Backed backed = new_backed();
    // The kernel cannot give a page beyond the file's end: a touch would get a signal, this call gets a Status.
    CHECK_EQUAL(ftruncate(backed.file.number(), kBackedBytes / 2), 0);
    CHECK(!populate_pages(backed.start() + kBackedBytes / 2, kBackedBytes / 2).ok());
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
