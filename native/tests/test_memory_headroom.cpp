#include "shim/memory_headroom.hpp"

#include <vector>

#include "check.hpp"
#include "made_up_files.hpp"

using namespace kvo;
using kvo::test::MadeUpFiles;

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct File {
    std::string path;
    std::string text;
};

struct Case {
    const char* name;
    std::string cgroup;  // the line of self/cgroup
    std::string mount;   // of self/mountinfo; @ stands for the made-up root
    std::vector<File> files;
    std::uint64_t expected_mib;
    std::string limited_by;  // a part of the words
};

const std::string kMount2 = "38 31 0:41 / @/cg rw,relatime shared:1 - cgroup2 cgroup2 rw";
const std::string kMount1 = "35 31 0:32 / @/cg rw,relatime - cgroup cgroup rw,memory";

std::string mib(std::uint64_t number) { return std::to_string(number * kMiB); }

std::vector<Case> all_cases() {
    return {
        {"no cgroup at all", "", "", {}, 4096, "MemAvailable"},
        {"version 2, no limit",
         "0::/a",
         kMount2,
         {{"cg/a/memory.max", "max"}, {"cg/a/memory.current", mib(5)}},
         4096,
         "MemAvailable"},
        {"version 2, a limit on our own",
         "0::/a/b",
         kMount2,
         {{"cg/a/b/memory.max", mib(1000)}, {"cg/a/b/memory.current", mib(400)}},
         600,
         "cg/a/b is limited to"},
        {"version 2, the parent's is nearer",
         "0::/a/b",
         kMount2,
         {{"cg/a/b/memory.max", mib(1000)},
          {"cg/a/b/memory.current", mib(400)},
          {"cg/a/memory.max", mib(2000)},
          {"cg/a/memory.current", mib(1900)}},
         100,
         "cg/a is limited to"},
        {"version 2, memory.high is nearer",
         "0::/a",
         kMount2,
         {{"cg/a/memory.max", mib(1000)}, {"cg/a/memory.high", mib(500)}, {"cg/a/memory.current", mib(400)}},
         100,
         "memory.high"},
        {"cache that can be dropped is no use",
         "0::/a",
         kMount2,
         {{"cg/a/memory.max", mib(1000)},
          {"cg/a/memory.current", mib(900)},
          {"cg/a/memory.stat", "anon 1\ninactive_file_x 7\ninactive_file " + mib(200) + "\nactive_file " + mib(100)}},
         350,
         "cg/a is limited to"},
        {"more in use than the limit",
         "0::/a",
         kMount2,
         {{"cg/a/memory.max", mib(100)}, {"cg/a/memory.current", mib(150)}},
         0,
         "cg/a is limited to"},
        {"a container's own namespace: limits at the mount's root",
         "0::/",
         kMount2,
         {{"cg/memory.max", mib(300)}, {"cg/memory.current", mib(100)}},
         200,
         "cg is limited to"},
        {"version 1",
         "4:cpu,memory:/x/y",
         kMount1,
         {{"cg/x/y/memory.limit_in_bytes", "9223372036854771712"},
          {"cg/x/y/memory.usage_in_bytes", mib(10)},
          {"cg/x/memory.limit_in_bytes", mib(700)},
          {"cg/x/memory.usage_in_bytes", mib(600)},
          {"cg/x/memory.stat", "inactive_file 1\ntotal_inactive_file " + mib(50) + "\ntotal_active_file " + mib(20)}},
         160,
         "memory.limit_in_bytes"},
        {"version 1, the mount begins at our cgroup",
         "4:memory:/docker/abc",
         "35 31 0:32 /docker/abc @/cg rw - cgroup cgroup rw,memory",
         {{"cg/memory.limit_in_bytes", mib(300)}, {"cg/memory.usage_in_bytes", mib(100)}},
         200,
         "cg is limited to"},
        {"version 1, the path leads out of the mount",
         "4:memory:/../other",
         kMount1,
         {{"cg/memory.limit_in_bytes", mib(300)}, {"cg/memory.usage_in_bytes", mib(50)}},
         250,
         "memory.limit_in_bytes"},
        {"the machine has less than the cgroup may take",
         "0::/a",
         kMount2,
         {{"cg/a/memory.max", mib(9000)}, {"cg/a/memory.current", mib(1)}},
         4096,
         "MemAvailable"},
        {"broken files set no bound",
         "0::/a",
         kMount2,
         {{"cg/a/memory.max", "many"}, {"cg/a/memory.current", "some"}},
         4096,
         "MemAvailable"},
    };
}

}  // namespace

TEST(the_nearest_bound_counts) {
    for (const Case& each : all_cases()) {
        const MadeUpFiles files("headroom");
        files.write_available(4096 * kMiB);
        std::string mount = each.mount;
        if (const std::size_t at = mount.find('@'); at != std::string::npos) {
            mount.replace(at, 1, files.root().string());
        }
        files.write("self/cgroup", "9:name=systemd:/other\n" + each.cgroup);
        files.write("self/mountinfo", "31 23 0:28 / /sys rw - tmpfs tmpfs rw\nbroken line\n" + mount);
        for (const File& file : each.files) {
            files.write(file.path, file.text);
        }
        const MemoryHeadroom headroom = read_memory_headroom(files.root());
        if (headroom.bytes != each.expected_mib * kMiB ||
            headroom.limited_by.find(each.limited_by) == std::string::npos) {
            test::fail(
                __FILE__, __LINE__,
                std::string(each.name) + ": " + std::to_string(headroom.bytes / kMiB) + " MiB, " + headroom.limited_by);
        }
    }
}

TEST(a_machine_that_shows_nothing_sets_no_bound) {
    const MadeUpFiles files("headroom_none");
    const MemoryHeadroom headroom = read_memory_headroom(files.root());
    CHECK_EQUAL(headroom.bytes, UINT64_MAX);
    CHECK(headroom.limited_by.empty());
    CHECK(check_memory_headroom(std::uint64_t{1} << 60, files.root()).ok());
}

TEST(a_shortage_says_what_was_asked_and_what_bounds_it) {
    const MadeUpFiles files("headroom_short");
    files.write_available(10 * kMiB);
    CHECK(check_memory_headroom(10 * kMiB, files.root()).ok());
    CHECK(check_memory_headroom(10 * kMiB + 1, files.root()).code() == Code::unavailable);
    const Status refusal = check_memory_headroom(1536 * kMiB, files.root());
    CHECK(refusal.message().find("1.5GiB of memory are not there") != std::string::npos);
    CHECK(refusal.message().find("10MiB are left") != std::string::npos);
    CHECK(refusal.message().find("MemAvailable") != std::string::npos);
}

TEST(this_machine_can_be_read) {
    const MemoryHeadroom headroom = read_memory_headroom();
    CHECK(headroom.bytes > 0);
    CHECK(!headroom.limited_by.empty());
}

TEST(what_there_is_if_nobody_used_any_bounds_it_for_good) {
    const MadeUpFiles files("headroom_total");
    CHECK_EQUAL(read_memory_headroom(files.root()).total_bytes, UINT64_MAX);
    files.write("meminfo", "MemTotal: " + std::to_string(8192 * 1024) + " kB\nMemAvailable: 1000 kB");
    CHECK_EQUAL(read_memory_headroom(files.root()).total_bytes, 8192 * kMiB);
    files.write("self/cgroup", "0::/a");
    files.write("self/mountinfo",
                "38 31 0:41 / " + (files.root() / "cg").string() + " rw shared:1 - cgroup2 cgroup2 rw");
    files.write("cg/a/memory.max", mib(3000));
    files.write("cg/a/memory.current", mib(2999));
    CHECK_EQUAL(read_memory_headroom(files.root()).total_bytes, 3000 * kMiB);
}
