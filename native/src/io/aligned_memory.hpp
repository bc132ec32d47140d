// Memory that O_DIRECT files can be read to and written from.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "base/status.hpp"

namespace kvo {

// Whole pages of zeros, given by the kernel at the first touch and given back with the object.
class AlignedMemory {
public:
    AlignedMemory() noexcept = default;
    static Result<AlignedMemory> create(std::size_t bytes);  // rounded up to kIoAlignment

    AlignedMemory(AlignedMemory&& other) noexcept
        : start_(std::exchange(other.start_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    AlignedMemory& operator=(AlignedMemory&& other) noexcept {
        std::swap(start_, other.start_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~AlignedMemory();

    std::byte* start() const noexcept { return start_; }
    std::size_t bytes() const noexcept { return bytes_; }
    std::span<std::byte> span() const noexcept { return {start_, bytes_}; }

    // Gives the pages up without unmapping them, since the kernel may still write to them.
    void abandon() noexcept {
        start_ = nullptr;
        bytes_ = 0;
    }

private:
    AlignedMemory(std::byte* start, std::size_t bytes) noexcept : start_(start), bytes_(bytes) {}

    std::byte* start_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace kvo
