// A mapping of a shared file, at an address that huge pages can be used at.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.hpp"

namespace kvo {

enum class Access : std::uint8_t { read_only, read_write };

// Whether a child of fork() has the mapping, too.
enum class ForkRule : std::uint8_t {
    // Nothing is mapped: touching it ends the child with SIGSEGV. For a server's structures, since two processes that
    // both believe to own them would destroy them. For an engine's segments too: the server does not know the child, so
    // it would give away slots that the child still copies from once the processes that it knows have ended.
    drop,
    // The same pages are mapped. For read-only mappings whose readers check what they read.
    keep,
};

class SharedMapping {
public:
    SharedMapping() noexcept = default;
    // Maps `size` bytes from the file's beginning, starting at a multiple of `alignment` (a power of two, at least a
    // page). Does not touch the pages; of a hugetlb file it reserves them. The file may be closed afterwards.
    static Result<SharedMapping> map(int file, std::size_t size, std::size_t alignment, Access access, ForkRule rule);

    SharedMapping(SharedMapping&& other) noexcept { swap(other); }
    SharedMapping& operator=(SharedMapping&& other) noexcept {
        SharedMapping taken(std::move(other));
        swap(taken);
        return *this;
    }
    ~SharedMapping();

    std::byte* start() const noexcept { return start_; }  // writing is the caller's promise of Access::read_write
    std::size_t size() const noexcept { return size_; }

private:
    void swap(SharedMapping& other) noexcept {
        std::swap(start_, other.start_);
        std::swap(size_, other.size_);
        std::swap(mapped_by_, other.mapped_by_);
        std::swap(rule_, other.rule_);
    }

    std::byte* start_ = nullptr;
    std::size_t size_ = 0;
    pid_t mapped_by_ = 0;
    ForkRule rule_ = ForkRule::drop;
};

}  // namespace kvo
