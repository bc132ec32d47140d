// A segment file that an input describes: its parts at any place, with any numbers in them, and checksums that are
// right, or are not.
#pragma once

#include <vector>

#include "disk/record_format.hpp"
#include "target.hpp"

namespace kvo::fuzz {

inline constexpr std::uint64_t kImageBytes = 64 << 10;
inline constexpr std::uint64_t kImageStore = 0x5707e;

// The kind of the next part in the description of an image.
enum class Part : std::uint8_t { noise, head, record, footer, sealed_noise, end };
inline constexpr std::uint8_t kPartKinds = 6;

std::vector<std::byte> make_image(Input& input);

// Descriptions of a segment without a footer, and with one.
Bytes describe_segment(bool is_sealed);

// Sealed, with a footer whose entries reach beyond what is before it.
Bytes describe_lying_segment();

// The bytes and the key of one of the records that are described.
std::vector<std::byte> record_bytes(std::uint64_t length);
RecordKey record_key(std::uint8_t number);

}  // namespace kvo::fuzz
