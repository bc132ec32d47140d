#include "shim/host_memory.hpp"

#include <unistd.h>

#include <fstream>

#include "check.hpp"

using namespace kvo;
namespace fs = std::filesystem;

namespace {

// A /sys of our own, gone with the test.
class MadeUpSysfs {
public:
    MadeUpSysfs() : root_(fs::temp_directory_path() / ("kvoffload_sysfs_" + std::to_string(getpid()))) {
        fs::create_directories(root_);
    }
    ~MadeUpSysfs() { fs::remove_all(root_); }
    MadeUpSysfs(const MadeUpSysfs&) = delete;
    MadeUpSysfs& operator=(const MadeUpSysfs&) = delete;

    void write(const std::string& path, const std::string& text) const {
        fs::create_directories((root_ / path).parent_path());
        std::ofstream(root_ / path) << text << "\n";
    }
    const fs::path& root() const { return root_; }

private:
    fs::path root_;
};

}  // namespace

TEST(reads_pools_choices_and_nodes) {
    const MadeUpSysfs sysfs;
    sysfs.write("kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "4");
    sysfs.write("kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "3");
    sysfs.write("kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512");
    sysfs.write("kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0");
    sysfs.write("kernel/mm/hugepages/hugepages-bigkB/nr_hugepages", "1");
    sysfs.write("kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
    sysfs.write("kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force");
    sysfs.write("devices/system/node/node0/cpulist", "0");
    sysfs.write("devices/system/node/node1/cpulist", "1");
    sysfs.write("devices/system/node/online", "0-1");

    const HostMemory memory = read_host_memory(sysfs.root());
    CHECK_EQUAL(memory.huge_pages.size(), 2u);
    CHECK_EQUAL(memory.huge_pages[0].page_bytes, 2u << 20);
    CHECK_EQUAL(memory.huge_pages[0].total, 512u);
    CHECK_EQUAL(memory.huge_pages[0].free, 0u);
    CHECK_EQUAL(memory.huge_pages[1].page_bytes, 1u << 30);
    CHECK_EQUAL(memory.huge_pages[1].free, 3u);
    CHECK_EQUAL(memory.transparent_huge_pages, "madvise");
    CHECK_EQUAL(memory.transparent_huge_pages_in_shmem, "never");
    CHECK_EQUAL(memory.numa_nodes, 2u);
}

TEST(a_machine_that_shows_nothing_has_defaults) {
    const MadeUpSysfs sysfs;
    const HostMemory memory = read_host_memory(sysfs.root() / "absent");
    CHECK(memory.page_bytes >= 4096);
    CHECK(memory.huge_pages.empty());
    CHECK(memory.transparent_huge_pages.empty());
    CHECK_EQUAL(memory.numa_nodes, 1u);
}

TEST(this_machine_can_be_read) { CHECK(read_host_memory().numa_nodes >= 1); }
