#include "io/aligned_memory.hpp"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.hpp"
#include "io/io_engine.hpp"

using namespace kvo;

namespace {

// Of the mapping that this address is in, as the kernel tells.
std::string flags_at(const std::byte* memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    std::ifstream maps("/proc/self/smaps");
    bool is_in = false;
    for (std::string line; std::getline(maps, line);) {
        unsigned long long begin = 0;
        unsigned long long end = 0;
        if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
            is_in = begin <= address && address < end;
        } else if (is_in && line.starts_with("VmFlags:")) {
            return line;
        }
    }
    return {};
}

}  // namespace

TEST(memory_is_aligned_whole_pages_of_zeros) {
    Result<AlignedMemory> memory = AlignedMemory::create(kIoAlignment + 1);
    CHECK(memory.ok());
    CHECK_EQUAL(memory.value().bytes(), 2 * kIoAlignment);
    CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(memory.value().start()) % kIoAlignment, std::uintptr_t{0});
    for (const std::byte one : memory.value().span()) {
        CHECK(one == std::byte{0});
    }
    AlignedMemory moved = std::move(memory.value());
    CHECK_EQUAL(memory.value().bytes(), std::size_t{0});
    std::byte* const start = moved.start();
    moved.abandon();
    start[0] = std::byte{1};  // still there
}

TEST(memory_that_nobody_has_is_a_fault) { CHECK(!AlignedMemory::create(std::size_t{1} << 60).ok()); }

TEST(memory_for_io_is_asked_for_in_huge_pages) {
    if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
        std::printf("      skipped: this kernel has no transparent huge pages\n");
        return;
    }
    Result<AlignedMemory> memory = AlignedMemory::create(std::size_t{4} << 20);
    CHECK(memory.ok());
    CHECK(flags_at(memory.value().start()).find(" hg") != std::string::npos);
}
