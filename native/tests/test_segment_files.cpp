#include "disk/segment_files.hpp"

#include <dlfcn.h>
#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <filesystem>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

std::atomic<int> segments_left = -1;  // until the file system is full; -1: it never is

}  // namespace

// Instead of the C library's, for the core as well.
extern "C" int fallocate(int file, int mode, off_t offset, off_t length) {
    if (segments_left == 0) {
        errno = ENOSPC;
        return -1;
    }
    segments_left -= segments_left > 0 ? 1 : 0;
    static auto* const next = reinterpret_cast<decltype(&fallocate)>(dlsym(RTLD_NEXT, "fallocate"));
    return next(file, mode, offset, length);
}

namespace {

struct Scene {
    explicit Scene(const std::string& name, std::uint64_t daily_bytes = 0) : folder("segment_files_" + name) {
        CHECK_EQUAL(chmod(folder.root().c_str(), 0700), 0);
        terms = small_terms(folder.root().string());
        terms.capacity_bytes = 4 * kSmallSegment;
        terms.daily_bytes = daily_bytes;
        terms.now = [this] { return clock; };
    }
    std::size_t file_count() const {
        std::size_t count = 0;
        for (std::uint32_t number = 0; number < 8; ++number) {
            count += std::filesystem::exists(folder.root() / segment_file_name(number)) ? 1 : 0;
        }
        return count;
    }

    MadeUpFiles folder;
    DeviceTerms terms;
    DeviceCounts counts;
    Instant clock = std::chrono::steady_clock::now();
};

std::uint32_t begin_one(SegmentFiles& files) {
    const Result<std::uint32_t> number = files.find_empty();
    CHECK(number.ok());
    files.begin_life(number.value());
    return number.value();
}

}  // namespace

TEST(a_file_is_created_when_no_empty_one_is_left) {
    Scene scene("created");
    SegmentFiles files(scene.terms, scene.counts);
    CHECK(files.open().ok());
    CHECK_EQUAL(files.empty_count(), std::size_t{4});
    CHECK_EQUAL(files.file_count(), std::uint64_t{0});
    const std::uint32_t first = begin_one(files), second = begin_one(files);
    CHECK(first != second);
    CHECK(files[first].life.generation < files[second].life.generation);
    CHECK_EQUAL(files[first].life.store, files.store());
    CHECK(files[first].state == SegmentState::writing);
    CHECK_EQUAL(files.empty_count(), std::size_t{2});
    CHECK_EQUAL(scene.file_count(), std::size_t{2});
    files[first].state = SegmentState::empty;  // as after its eviction
    CHECK_EQUAL(files.find_empty().value(), first);
    CHECK_EQUAL(files.file_count(), std::uint64_t{2});
}

TEST(a_folder_that_is_opened_anew_knows_its_store_and_goes_on_with_its_lives) {
    Scene scene("anew");
    SegmentFiles files(scene.terms, scene.counts);
    CHECK(files.open().ok());
    const std::uint32_t number = begin_one(files);
    const SegmentLife life = files[number].life;
    const std::uint64_t store = files.store();
    CHECK(files.open().ok());
    CHECK_EQUAL(files.store(), store);
    CHECK_EQUAL(files.file_count(), std::uint64_t{0});
    CHECK(files.open_file(number).ok());
    files.go_on_with_life(number, {store, life.generation + 5});
    CHECK(files.has_any(SegmentState::full));
    const std::uint32_t next = begin_one(files);
    CHECK_EQUAL(files[next].life.generation, life.generation + 6);
}

TEST(another_store_in_the_folder_s_place_is_not_taken) {
    Scene scene("another");
    SegmentFiles files(scene.terms, scene.counts);
    CHECK(files.open().ok());
    files.close();
    for (const auto& entry : std::filesystem::directory_iterator(scene.folder.root())) {
        std::filesystem::remove_all(entry);
    }
    CHECK(!files.open().ok());  // nor is one made there
    CHECK_EQUAL(scene.file_count(), std::size_t{0});
}

TEST(a_file_beyond_the_capacity_is_not_opened_and_can_be_removed) {
    Scene scene("beyond");
    {
        DeviceTerms larger = scene.terms;
        larger.capacity_bytes = 8 * kSmallSegment;
        SegmentFiles files(larger, scene.counts);
        CHECK(files.open().ok());
        for (int i = 0; i < 6; ++i) {
            begin_one(files);
        }
    }
    SegmentFiles files(scene.terms, scene.counts);
    CHECK(files.open().ok());
    CHECK_EQUAL(files.list().value().size(), std::size_t{6});
    CHECK(files.open_file(5).code() == Code::unavailable);
    CHECK(files.remove_file(5).ok());
    CHECK(files.open_file(3).ok());
    CHECK(files.remove_file(3).ok());
    CHECK_EQUAL(files.file_count(), std::uint64_t{0});
    CHECK_EQUAL(scene.file_count(), std::size_t{4});
}

TEST(a_probe_is_paid_for_like_any_other_bytes) {
    constexpr std::uint64_t kDaily = 24 * 8 * kIoAlignment;
    Scene scene("paid", kDaily);
    SegmentFiles files(scene.terms, scene.counts);
    CHECK(files.open().ok());
    CHECK(files.may_spend(8 * kIoAlignment));
    CHECK(files.try_writing().ok());
    CHECK(!files.may_spend(8 * kIoAlignment));
    CHECK(files.may_spend(7 * kIoAlignment));
    files.spend(7 * kIoAlignment);
    CHECK(!files.may_spend(1));
    CHECK_EQUAL(scene.counts.written_bytes, 8 * std::uint64_t{kIoAlignment});
}

TEST(a_full_file_system_makes_room_among_four_segments_and_takes_none_of_three) {
    for (const std::uint64_t made : {3, 4}) {
        Scene scene("full");
        scene.terms.capacity_bytes = 8 * kSmallSegment;
        SegmentFiles files(scene.terms, scene.counts);
        CHECK(files.open().ok());
        segments_left = static_cast<int>(made);
        for (std::uint64_t i = 0; i < made; ++i) {
            begin_one(files);
        }
        const bool is_rotating = made == 4;
        CHECK(files.shortage().empty());
        CHECK(files.find_empty().fault().code() == (is_rotating ? Code::unavailable : Code::failed));
        CHECK_EQUAL(files.empty_count() == 0, is_rotating);  // else the evictor has nothing to do
        CHECK_EQUAL(
            files.shortage().find("No space left on device; blocks are kept in the 4 of 8") != std::string::npos,
            is_rotating);
        // A small store is written to again when there is room for a segment. One that makes room itself is not kept
        // from writing by that.
        CHECK_EQUAL(files.try_writing().ok(), is_rotating);
        scene.clock += 61s;
        files.ask_for_room(scene.clock);
        CHECK_EQUAL(files.shortage().empty(), !is_rotating);
        segments_left = 1;
        files.ask_for_room(scene.clock + 59s);
        CHECK_EQUAL(files.file_count(), made);
        if (is_rotating) {
            files.ask_for_room(scene.clock + 60s);
        } else {
            CHECK(files.try_writing().ok());
        }
        CHECK(files.shortage().empty());
        CHECK_EQUAL(files.file_count(), made + 1);
        CHECK(files.find_empty().ok());
        segments_left = -1;
    }
}

using namespace std::chrono_literals;

TEST(without_a_bound_everything_is_allowed) {
    WriteBudget budget(0, Instant(), false);
    budget.charge(std::uint64_t{1} << 50);
    CHECK(budget.allows(std::uint64_t{1} << 50, Instant()));
}

TEST(a_new_folder_has_an_hour_and_one_that_was_there_nothing) {
    CHECK(WriteBudget(2400, Instant(), true).allows(100, Instant()));
    CHECK(!WriteBudget(2400, Instant(), true).allows(101, Instant()));
    CHECK(!WriteBudget(2400, Instant(), false).allows(1, Instant()));
}

TEST(no_day_sees_more_than_its_bytes) {
    WriteBudget budget(24 << 20, Instant(), true);
    std::uint64_t written = 0;
    for (Instant now; now < Instant() + 24h; now += 10s) {
        for (; budget.allows(1000, now); written += 1000) {
            budget.charge(1000);
        }
    }
    const std::uint64_t day = 24 << 20;
    CHECK(written <= day);
    CHECK(written > day / 100 * 95);
}

TEST(what_was_written_beyond_it_is_owed) {
    WriteBudget budget(2400, Instant(), true);
    budget.charge(200);
    CHECK(!budget.allows(1, Instant() + 62min));
    CHECK(budget.allows(1, Instant() + 64min));
}
