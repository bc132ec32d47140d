#include "shim/shared_mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "base/status.hpp"

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

namespace {

// Named here because the headers of older systems do not know them.
constexpr int kPopulateWrite = 23;
constexpr int kCollapse = 25;

// The range a line such as "7f00-7f10 rw-s ..." of smaps begins with; false for the lines in between.
bool parse_range(std::string_view line, std::uintptr_t& begin, std::uintptr_t& end) {
    const char* const last = line.data() + line.size();
    const auto [dash, fault] = std::from_chars(line.data(), last, begin, 16);
    if (fault != std::errc{} || dash == last || *dash != '-') {
        return false;
    }
    return std::from_chars(dash + 1, last, end, 16).ec == std::errc{};
}

// The kibibytes of a line of one of the kinds that count huge pages; 0 for the others.
std::uint64_t parse_huge_kibibytes(std::string_view line) {
    for (const std::string_view key : {"ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"}) {
        if (line.starts_with(key)) {
            line.remove_prefix(std::min(line.find_first_of("0123456789"), line.size()));
            std::uint64_t kibibytes = 0;
            std::from_chars(line.data(), line.data() + line.size(), kibibytes);
            return kibibytes;
        }
    }
    return 0;
}

}  // namespace

Status allocate_file_pages(int file, std::uint64_t offset, std::uint64_t length) {
    while (fallocate(file, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(length)) != 0) {
        const int error = errno;
        if (error == ENOSPC || error == ENOMEM) {
            return {Code::unavailable,
                    "the kernel has no memory for " + std::to_string(length) + " bytes of a segment"};
        }
        if (error != EINTR) {
            return system_fault("fallocate", error);
        }
    }
    return {};
}

Status free_file_pages(int file, std::uint64_t offset, std::uint64_t length) {
    while (fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(length)) != 0) {
        if (errno != EINTR) {
            return system_fault("fallocate(FALLOC_FL_PUNCH_HOLE)", errno);
        }
    }
    return {};
}

void touch_pages(const void* start, std::size_t length) {
    const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    // A read, as another process may be using the content. On a shared mapping it maps the file's own page.
    const volatile unsigned char* const bytes = static_cast<const unsigned char*>(start);
    for (std::size_t offset = 0; offset < length; offset += page_bytes) {
        static_cast<void>(bytes[offset]);
    }
}

Status populate_pages(void* start, std::size_t length) {
    auto* const first = static_cast<unsigned char*>(start);
    for (std::size_t offset = 0; offset < length; offset += kHugePageBytes) {
        const std::size_t piece = std::min(kHugePageBytes, length - offset);
        while (madvise(first + offset, piece, kPopulateWrite) != 0) {
            const int error = errno;
            if (error == EINVAL) {
                touch_pages(start, length);
                return {};
            }
            if (error == ENOMEM || error == EFAULT) {
                return {Code::unavailable, "the kernel has no memory to map " + std::to_string(length) + " bytes"};
            }
            if (error != EINTR && error != EAGAIN) {
                return system_fault("madvise(MADV_POPULATE_WRITE)", error);
            }
        }
    }
    return {};
}

void collapse_into_huge_pages(void* start, std::size_t length) {
    const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    const std::size_t lead = (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
    if (length < lead + kHugePageBytes) {
        return;
    }
    unsigned char* const first = static_cast<unsigned char*>(start) + lead;
    const std::size_t whole = (length - lead) / kHugePageBytes * kHugePageBytes;
    // A piece without any page is passed over by the kernel; one page makes the rest be taken straight as a huge page,
    // with nothing to copy.
    for (std::size_t offset = 0; offset < whole; offset += kHugePageBytes) {
        if (madvise(first + offset, page_bytes, kPopulateWrite) != 0) {
            return;
        }
    }
    static_cast<void>(madvise(first, whole, kCollapse));
}

std::uint64_t huge_bytes_mapped(const void* start, std::size_t length) {
    const auto begin = reinterpret_cast<std::uintptr_t>(start);
    std::uint64_t kibibytes = 0;
    bool is_inside = false;
    std::ifstream smaps("/proc/self/smaps");
    std::string line;
    while (std::getline(smaps, line)) {
        std::uintptr_t from = 0;
        std::uintptr_t to = 0;
        if (parse_range(line, from, to)) {
            is_inside = from >= begin && to <= begin + length;
        } else if (is_inside) {
            kibibytes += parse_huge_kibibytes(line);
        }
    }
    return kibibytes * 1024;
}

}  // namespace kvo
