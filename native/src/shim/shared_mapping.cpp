#include "shim/shared_mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "shim/system_fault.hpp"

namespace kvo {
namespace {

// Address space of which a part is at a multiple of `alignment`; nothing is mapped there that could be touched.
Result<std::byte*> reserve_aligned(std::size_t size, std::size_t alignment) {
    const std::size_t span = size + alignment;
    void* const address = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
        return system_fault("no address space for " + std::to_string(span) + " bytes (ulimit -v?)", errno);
    }
    std::byte* const begin = static_cast<std::byte*>(address);
    const std::size_t lead = (alignment - reinterpret_cast<std::uintptr_t>(begin) % alignment) % alignment;
    if (lead > 0) {
        munmap(begin, lead);
    }
    munmap(begin + lead + size, alignment - lead);
    return begin + lead;
}

}  // namespace

Result<SharedMapping> SharedMapping::map(int file, std::size_t size, std::size_t alignment, Access access,
                                         ForkRule rule) {
    const Result<std::byte*> place = reserve_aligned(size, alignment);
    if (!place.ok()) {
        return place.fault();
    }
    const int protection = access == Access::read_write ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mmap(place.value(), size, protection, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
        const int error = errno;
        munmap(place.value(), size);
        return system_fault("mapping " + std::to_string(size) + " bytes", error);
    }
    SharedMapping mapping;
    mapping.start_ = place.value();
    mapping.size_ = size;
    mapping.mapped_by_ = getpid();
    mapping.rule_ = rule;
    if (rule == ForkRule::drop && madvise(mapping.start_, size, MADV_DONTFORK) != 0) {
        return system_fault("madvise(MADV_DONTFORK)", errno);
    }
    return mapping;
}

SharedMapping::~SharedMapping() {
    // A child that did not inherit the mapping may have something else at its address.
    if (start_ != nullptr && (rule_ == ForkRule::keep || mapped_by_ == getpid())) {
        munmap(start_, size_);
    }
}

}  // namespace kvo
