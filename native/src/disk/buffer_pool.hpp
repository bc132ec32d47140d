// The memory that a device's reads and writes go through.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "io/aligned_memory.hpp"

namespace kvo {

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
