// The limit that the digest is measured against: nothing but reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvo {

// All bytes read once, in order, by this machine's widest loads. What comes back, the words combined by or (a last
// partial one with zeros), is there so that no compiler leaves a load out.
std::uint64_t read_bytes(std::span<const std::uint8_t> bytes) noexcept;

}  // namespace kvo
