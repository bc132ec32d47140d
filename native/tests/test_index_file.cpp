#include "index/index_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

#include "child_process.hpp"
#include "index_fixture.hpp"

using namespace kvo;
using kvo::test::ChildProcess;
using kvo::test::Line;
using kvo::test::take;

namespace {

IndexBounds bounds_for(EntryNumber entry_limit) {
    return {.entry_limit = entry_limit, .segment_bytes = 1 << 20, .extent_bytes = 4096};
}

FileDescriptor copy_of(const IndexFile& index) { return FileDescriptor(dup(index.segment().file())); }

Segment plain_segment(std::uint64_t size) {
    SegmentWish wish;
    wish.size_bytes = size;
    return take(Segment::create(wish));
}

}  // namespace

TEST(a_new_index_is_large_and_holds_little_memory) {
    const IndexFile index = take(IndexFile::create(bounds_for(10'000'000), 5));
    CHECK_EQUAL(index.segment().size_bytes(), plan_regions(10'000'000).file_bytes);
    CHECK(index.segment().size_bytes() > std::uint64_t{2} << 30);
    CHECK(index.segment().held_bytes() <= std::uint64_t{4} << 20);
    CHECK_EQUAL(index.view().header->seed, 5u);
    CHECK_EQUAL(index.view().header->bucket_count.load(), 0u);
}

TEST(bounds_that_cannot_be_served_are_refused) {
    for (const EntryNumber limit : {EntryNumber{0}, kEntryLimitMax + 1, kNoEntry}) {
        CHECK(!IndexFile::create(bounds_for(limit), 1).ok());
    }
}

TEST(memory_comes_ahead_of_its_use_and_keeps_what_is_there) {
    IndexFile index = take(IndexFile::create(bounds_for(1'000'000), 1));
    const Region entries = index.view().regions.entries;
    std::uint64_t held = index.segment().held_bytes();
    int steps = 0;
    for (EntryNumber count = 1; count <= 300'000; count += 1'000) {
        CHECK(index.ensure(entries, count).ok());
        index.view().entries[count - 1].slot.store(count);
        const std::uint64_t now = index.segment().held_bytes();
        steps += now != held;
        held = now;
    }
    CHECK(steps < 40);  // a quarter at a time
    const std::uint64_t used = 300'000 * sizeof(Entry);
    CHECK(held < used + used / 4 + (std::uint64_t{8} << 20));
    for (EntryNumber count = 1; count <= 300'000; count += 1'000) {
        CHECK_EQUAL(index.view().entries[count - 1].slot.load(), count);
    }
    CHECK(index.ensure(entries, 5).ok());  // long there
    CHECK_EQUAL(index.segment().held_bytes(), held);
}

TEST(a_region_ends_at_its_limit) {
    IndexFile index = take(IndexFile::create(bounds_for(1000), 1));
    const IndexRegions& regions = index.view().regions;
    for (const Region* const region : {&regions.buckets, &regions.overflow, &regions.entries, &regions.digests,
                                       &regions.shard_digests, &regions.lease_nodes}) {
        CHECK(index.ensure(*region, region->item_limit).ok());
        const Status status = index.ensure(*region, region->item_limit + 1);
        CHECK(status.code() == Code::failed);
        CHECK(status.message().find(std::to_string(region->item_limit)) != std::string::npos);
    }
}

TEST(an_index_lives_on_in_another_owner) {
    IndexFile index = take(IndexFile::create(bounds_for(50'000), 9));
    const IndexRegions& regions = index.view().regions;
    CHECK(index.ensure(regions.entries, 20'000).ok());
    CHECK(index.ensure(regions.digests, 20'000).ok());
    CHECK(index.ensure(regions.buckets, 64).ok());
    index.view().header->entry_count = 20'000;
    index.view().header->bucket_count = 64;
    for (EntryNumber number = 0; number < 20'000; ++number) {
        index.view().entries[number].slot.store(number * 3);
    }
    IndexFile adopted = take(IndexFile::adopt(copy_of(index)));
    CHECK_EQUAL(adopted.view().header->seed, 9u);
    for (EntryNumber number = 0; number < 20'000; ++number) {
        CHECK_EQUAL(adopted.view().entries[number].slot.load(), number * 3);
    }
    // Memory that is there is kept, and the file grows from where it was.
    CHECK(adopted.ensure(regions.entries, 50'000).ok());
    CHECK_EQUAL(adopted.view().entries[19'999].slot.load(), 19'999u * 3);
    adopted.view().entries[49'999].slot.store(1);
    CHECK_EQUAL(index.view().entries[49'999].slot.load(), 1u);

    IndexFile moved = std::move(adopted);
    const std::uint64_t held = moved.segment().held_bytes();
    CHECK(moved.ensure(regions.entries, 50'000).ok());
    CHECK_EQUAL(moved.segment().held_bytes(), held);
    CHECK_EQUAL(moved.view().entries[1].slot.load(), 3u);
}

TEST(a_sign_is_there_as_long_as_its_process_has_the_file) {
    const IndexFile index = take(IndexFile::create(bounds_for(1000), 1));
    CHECK(!index.has_sign(0) && !index.has_sign(4095));
    FileDescriptor mine = take(index.open_signed(4095));
    CHECK_EQUAL(fcntl(mine.number(), F_GETFL) & O_ACCMODE, O_RDONLY);
    CHECK(index.has_sign(4095) && !index.has_sign(4094) && !index.has_sign(0));
    {
        // Another process of the same session; and what a fork has of it is a copy.
        FileDescriptor others = take(index.open_signed(4095));
        ChildProcess child([](const Line& line) {
            line.await();
            return 0;
        });
        mine = FileDescriptor();
        others = FileDescriptor();
        CHECK(index.has_sign(4095));
        child.send_signal(SIGKILL);
        child.wait_zombie();
        CHECK(!index.has_sign(4095));
    }
    // A mapping of the file counts as much as an open descriptor.
    FileDescriptor signed_file = take(index.open_signed(7));
    void* const mapped = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, signed_file.number(), 0);
    CHECK(mapped != MAP_FAILED);
    signed_file = FileDescriptor();
    CHECK(index.has_sign(7));
    CHECK_EQUAL(munmap(mapped, 4096), 0);
    CHECK(!index.has_sign(7));
}

TEST(only_an_index_is_adopted) {
    CHECK(!IndexFile::adopt(FileDescriptor()).ok());
    CHECK(!IndexFile::adopt(FileDescriptor(dup(STDERR_FILENO))).ok());

    Segment blank = plain_segment(plan_regions(100).file_bytes);
    CHECK(blank.commit_range(0, 4096).ok());
    CHECK(!IndexFile::adopt(FileDescriptor(dup(blank.file()))).ok());
    format_index(blank.writable_bytes().data(), bounds_for(100), 1);
    CHECK(IndexFile::adopt(FileDescriptor(dup(blank.file()))).ok());

    Segment other = plain_segment(plan_regions(1000).file_bytes);
    CHECK(other.commit_range(0, 4096).ok());
    format_index(other.writable_bytes().data(), bounds_for(100), 1);
    CHECK(!IndexFile::adopt(FileDescriptor(dup(other.file()))).ok());
}

TEST(regions_grow_side_by_side) {
    IndexFile index = take(IndexFile::create(bounds_for(100'000), 1));
    const IndexRegions& regions = index.view().regions;
    const std::array<const Region*, 4> all = {&regions.buckets, &regions.overflow, &regions.digests,
                                              &regions.lease_nodes};
    std::array<bool, 4> is_good{};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < all.size(); ++i) {
        threads.emplace_back([&, i] {
            is_good[i] = true;
            for (std::uint64_t count = 1; count <= 10'000; count += 7) {
                is_good[i] = is_good[i] && index.ensure(*all[i], count).ok();
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (const bool good : is_good) {
        CHECK(good);
    }
}
