// Memory that O_DIRECT files can be read to and written from.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

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

// The memory that a device's reads and writes go through.
//
// Aligned buffers of one size that go round.
class BufferPool {
public:
    BufferPool(AlignedMemory memory, std::size_t buffer_bytes) : memory_(std::move(memory)), bytes_(buffer_bytes) {
        for (std::size_t at = 0; at + bytes_ <= memory_.bytes(); at += bytes_) {
            free_.push_back(memory_.start() + at);
        }
        count_ = free_.size();
    }
    std::size_t free_count() const noexcept { return free_.size(); }
    std::size_t count() const noexcept { return count_; }
    std::size_t buffer_bytes() const noexcept { return bytes_; }
    std::byte* take() {
        std::byte* const buffer = free_.back();
        free_.pop_back();
        return buffer;
    }
    void give(std::byte* buffer) { free_.push_back(buffer); }
    void abandon() noexcept { memory_.abandon(); }

private:
    AlignedMemory memory_;
    std::size_t bytes_;
    std::size_t count_ = 0;
    std::vector<std::byte*> free_;
};

}  // namespace kvo
