#include "shim/shared_mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

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
