// The limit that the digest is measured against: nothing but reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvo {

// Reads all bytes once, in order, with this machine's widest loads. Returns all words combined by or (a last partial
// one with zeros), so that the compiler cannot leave a load out.
std::uint64_t read_bytes(std::span<const std::uint8_t> bytes) noexcept;

}  // namespace kvo
