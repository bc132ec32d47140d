#include "arena/segment.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "child_process.hpp"
#include "made_up_files.hpp"

using namespace kvo;
using test::ChildProcess;
using test::Line;
using test::MadeUpFiles;
namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kSize = 33 * kMiB;  // the last slice is a short one

Segment new_segment(std::uint64_t size, HugePages huge_pages) {
    SegmentWish wish;
    wish.size_bytes = size;
    wish.huge_pages = huge_pages;
    Result<Segment> segment = Segment::create(wish);
    CHECK(segment.ok());
    return std::move(segment.value());
}

PopulateTerms terms_of(unsigned threads, std::size_t slice_bytes = 4 * kMiB) {
    PopulateTerms terms;
    terms.threads = threads;
    terms.slice_bytes = slice_bytes;
    return terms;
}

// Our memory cgroup's folder where a child of it can be given a limit; empty if that is not so here.
fs::path find_own_cgroup() {
    std::ifstream stream("/proc/self/cgroup");
    std::string line;
    while (std::getline(stream, line)) {
        const bool is_version2 = line.starts_with("0::");
        const std::size_t controller = line.find(":memory:");
        if (!is_version2 && controller == std::string::npos) {
            continue;
        }
        const fs::path mount = is_version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        const std::string path = is_version2 ? line.substr(3) : line.substr(controller + 8);
        const fs::path folder = mount / fs::path(path).relative_path();
        if (fs::exists(folder / "memory.max") || fs::exists(folder / "memory.limit_in_bytes")) {
            return folder;
        }
    }
    return {};
}

// A cgroup below our own, so that limits set on us hold on; gone with the test.
class LimitedCgroup {
public:
    explicit LimitedCgroup(std::uint64_t limit) {
        const fs::path own = find_own_cgroup();
        if (own.empty()) {
            return;
        }
        folder_ = own / ("kvoffload_test_" + std::to_string(getpid()));
        if (mkdir(folder_.c_str(), 0700) != 0) {
            folder_.clear();
            return;
        }
        is_limited_ = write(fs::exists(folder_ / "memory.max") ? "memory.max" : "memory.limit_in_bytes", limit);
    }
    ~LimitedCgroup() {
        if (!folder_.empty()) {
            rmdir(folder_.c_str());
        }
    }
    LimitedCgroup(const LimitedCgroup&) = delete;
    LimitedCgroup& operator=(const LimitedCgroup&) = delete;

    bool is_limited() const { return is_limited_; }
    bool enter() const { return write("cgroup.procs", static_cast<std::uint64_t>(getpid())); }

private:
    bool write(const char* name, std::uint64_t number) const {
        std::ofstream stream(folder_ / name);
        stream << number << std::endl;
        return stream.good();
    }

    fs::path folder_;
    bool is_limited_ = false;
};

}  // namespace

TEST(all_pages_are_there_whatever_the_threads_and_slices) {
    for (const HugePages huge_pages : {HugePages::none, HugePages::transparent}) {
        for (const unsigned threads : {0U, 1U, 3U, 64U}) {
            for (const std::size_t slice : {std::size_t{1}, std::size_t{4 * kMiB}, std::size_t{1} << 40}) {
                Segment segment = new_segment(kSize, huge_pages);
                PopulateProgress progress;
                const Result<bool> populated = populate(segment, terms_of(threads, slice), progress);
                CHECK(populated.ok());
                CHECK(populated.value());
                CHECK_EQUAL(progress.done_bytes.load(), kSize);
                CHECK_EQUAL(segment.held_bytes(), kSize);
            }
        }
    }
}

TEST(a_range_is_given_its_pages_and_nothing_else_is) {
    for (const bool is_background : {false, true}) {
        Segment segment = new_segment(kSize, HugePages::none);
        PopulateTerms terms = terms_of(3);
        terms.is_background = is_background;
        PopulateProgress progress;
        CHECK(populate(segment, terms, progress, {.offset = 8 * kMiB, .length = 9 * kMiB}).value());
        CHECK_EQUAL(segment.held_bytes(), 9 * kMiB);
        CHECK(populate(segment, terms, progress, {.offset = 32 * kMiB, .length = 5 * kMiB}).value());
        CHECK_EQUAL(segment.held_bytes(), 10 * kMiB);
        CHECK(populate(segment, terms, progress, {.offset = 2 * kSize, .length = 1}).value());
        CHECK_EQUAL(progress.done_bytes.load(), 10 * kMiB);
        CHECK(populate(segment, terms, progress).value());
        CHECK_EQUAL(segment.held_bytes(), kSize);
    }
}

TEST(in_the_background_the_caller_keeps_its_priority) {
    Segment segment = new_segment(kSize, HugePages::none);
    PopulateTerms terms = terms_of(2);
    terms.is_background = true;
    PopulateProgress progress;
    const int before = getpriority(PRIO_PROCESS, 0);
    CHECK(populate(segment, terms, progress).value());
    CHECK_EQUAL(getpriority(PRIO_PROCESS, 0), before);
}

TEST(content_survives) {
    Segment segment = new_segment(kSize, HugePages::transparent);
    std::mt19937_64 random(5);
    for (int count = 0; count < 500; ++count) {
        const std::size_t offset = random() % kSize;
        segment.writable_bytes()[offset] = static_cast<std::byte>(random());
    }
    const std::vector<std::byte> before(segment.bytes().begin(), segment.bytes().end());
    PopulateProgress progress;
    CHECK(populate(segment, terms_of(2), progress).ok());
    CHECK(std::equal(before.begin(), before.end(), segment.bytes().begin()));
}

TEST(a_cancelled_run_ends_early_and_can_be_taken_up_again) {
    Segment segment = new_segment(kSize, HugePages::none);
    PopulateProgress progress;
    progress.is_cancelled = true;
    const Result<bool> cancelled = populate(segment, terms_of(2), progress);
    CHECK(cancelled.ok());
    CHECK(!cancelled.value());
    CHECK_EQUAL(progress.done_bytes.load(), 0u);
    CHECK_EQUAL(segment.held_bytes(), 0u);

    progress.is_cancelled = false;
    CHECK(populate(segment, terms_of(2), progress).value());
}

TEST(a_watcher_cancels_after_what_it_has_seen) {
    Segment segment = new_segment(128 * kMiB, HugePages::none);
    PopulateProgress progress;
    std::jthread watcher([&progress] {
        while (progress.done_bytes.load() == 0) {
            std::this_thread::yield();
        }
        progress.is_cancelled = true;
    });
    const Result<bool> populated = populate(segment, terms_of(2, 2 * kMiB), progress);
    watcher.join();
    CHECK(populated.ok());
    CHECK(progress.done_bytes > 0);
    CHECK_EQUAL(populated.value(), progress.done_bytes == segment.size_bytes());
    CHECK(segment.held_bytes() >= progress.done_bytes);
}

TEST(a_shortage_is_refused_before_anything_is_taken) {
    const MadeUpFiles proc("populate_short");
    Segment segment = new_segment(kSize, HugePages::none);
    PopulateTerms terms = terms_of(2);
    terms.proc = proc.root();
    PopulateProgress progress;

    proc.write_available(kSize - 4096);
    const Result<bool> refused = populate(segment, terms, progress);
    CHECK(refused.fault().code() == Code::unavailable);
    CHECK(refused.fault().message().find("33MiB of memory are not there") != std::string::npos);
    CHECK_EQUAL(segment.held_bytes(), 0u);

    proc.write_available(kSize);
    terms.keep_free_bytes = 1;
    CHECK(!populate(segment, terms, progress).ok());
    terms.keep_free_bytes = 0;
    CHECK(populate(segment, terms, progress).ok());

    proc.write_available(0);
    CHECK(populate(segment, terms, progress).value());  // nothing was missing
}

TEST(memory_taken_by_others_meanwhile_is_a_shortage_too) {
    const MadeUpFiles proc("populate_taken");
    PopulateTerms terms = terms_of(1, 2 * kMiB);
    terms.proc = proc.root();
    bool was_refused = false;
    // Now and then the work is over before the other thread gets to run.
    for (int attempt = 0; attempt < 100 && !was_refused; ++attempt) {
        proc.write_available(kSize);
        Segment segment = new_segment(kSize, HugePages::none);
        PopulateProgress progress;
        std::jthread taker([&] {
            while (progress.done_bytes.load() == 0) {
                std::this_thread::yield();
            }
            proc.write_available(kMiB);
        });
        const Result<bool> populated = populate(segment, terms, progress);
        taker.join();
        was_refused = !populated.ok();
        if (was_refused) {
            CHECK(populated.fault().code() == Code::unavailable);
            CHECK_EQUAL(segment.held_bytes(), progress.done_bytes.load());
        }
    }
    CHECK(was_refused);
}

TEST(a_cgroups_limit_is_a_status_and_nobody_is_killed) {
    const LimitedCgroup cgroup(64 * kMiB);
    if (!cgroup.is_limited()) {
        std::printf("      skipped: no memory cgroup can be made here\n");
        return;
    }
    ChildProcess child([&cgroup](const Line&) {
        if (!cgroup.enter()) {
            return 77;
        }
        PopulateProgress progress;
        Segment large = new_segment(128 * kMiB, HugePages::transparent);
        const Result<bool> refused = populate(large, terms_of(2), progress);
        const bool is_named = refused.fault().message().find("is limited to 64MiB") != std::string::npos;
        if (refused.fault().code() != Code::unavailable || !is_named || large.held_bytes() != 0) {
            return 1;
        }
        Segment small = new_segment(16 * kMiB, HugePages::transparent);
        if (!populate(small, terms_of(2), progress).ok()) {
            return 2;
        }
        return small.commit_range(0, 16 * kMiB).ok() && !large.commit_range(0, 60 * kMiB).ok() ? 0 : 3;
    });
    const int code = child.wait_exit();
    if (code == 77) {
        std::printf("      skipped: the cgroup made cannot be entered\n");
        return;
    }
    CHECK_EQUAL(code, 0);
}
