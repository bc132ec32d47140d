#include "io/aligned_memory.hpp"

#include <cstdint>

#include "check.hpp"
#include "io/io_engine.hpp"

using namespace kvo;

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
