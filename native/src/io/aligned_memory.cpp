#include "io/aligned_memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <string>

#include "base/status.hpp"
#include "io/io_engine.hpp"

namespace kvo {

Result<AlignedMemory> AlignedMemory::create(std::size_t bytes) {
    const std::size_t rounded = (bytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
    void* const start = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
        return system_fault("mmap of " + std::to_string(rounded) + " bytes for I/O", errno);
    }
    // Fewer pages to pin for each request. Without them it works as well.
    static_cast<void>(madvise(start, rounded, MADV_HUGEPAGE));
    return AlignedMemory(static_cast<std::byte*>(start), rounded);
}

AlignedMemory::~AlignedMemory() {
    if (start_ != nullptr) {
        munmap(start_, bytes_);
    }
}

}  // namespace kvo
