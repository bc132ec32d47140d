// Room for lists that are written in the order in which they are given back. Positions count for ever.
#pragma once

#include <cstdint>
#include <optional>

namespace kvo {

struct ListRing {
    std::uint64_t size_bytes = 0;
    std::uint64_t head = 0;  // the first byte that is free
    std::uint64_t tail = 0;  // the first one that is not, in the ring's last turn

    // Where so many bytes lie in one piece and are free; always found in an empty ring of twice that size.
    std::optional<std::uint64_t> find_room(std::uint64_t bytes) const noexcept {
        const std::uint64_t left = size_bytes - head % size_bytes;
        const std::uint64_t begin = bytes > left ? head + left : head;
        return begin + bytes - tail > size_bytes ? std::nullopt : std::optional(begin);
    }
    std::uint64_t offset_of(std::uint64_t position) const noexcept { return position % size_bytes; }
};

}  // namespace kvo
