// Chained hashes of token blocks, for engines that have none of their own.
//
// A sequence is cut into blocks of `block_size` tokens; each full block has a digest that names its tokens and all
// that came before:
//
//     digest[i] = SHA-256( digest[i - 1]       32 bytes; for block 0 the parent that the caller gives
//                        | token count          4 bytes, little-endian, = block_size
//                        | extra length         4 bytes, little-endian
//                        | tokens               4 bytes each, little-endian
//                        | extra )              what else the block's content depends on: an image, an adapter
//
// The two counts stand before what they count, so no two different blocks make the same message. A partial block at
// the end has no digest: what it holds can still grow. Stored entries are found by these bytes: changing any of it is
// a new format version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.hpp"
#include "hash/sha256.hpp"

namespace kvo {

// The extra bytes of all full blocks, one after the other. Block i's end at `ends[i]`; no ends: no block has any.
struct BlockExtras {
    std::span<const std::uint8_t> bytes;
    std::span<const std::uint64_t> ends;
};

constexpr std::size_t full_blocks(std::size_t token_count, std::uint32_t block_size) noexcept {
    return block_size == 0 ? 0 : token_count / block_size;
}

// Writes full_blocks() digests to `out`, which must be exactly that long. Code::invalid if an argument is wrong; then
// nothing is written. Never blocks; throws std::bad_alloc only. `out` must not overlap the inputs.
Status hash_blocks(std::span<const std::uint32_t> tokens, std::uint32_t block_size,
                   std::span<const std::uint8_t, kDigestBytes> parent, BlockExtras extras, std::span<std::uint8_t> out,
                   const Sha256Path& path = sha256_path());

}  // namespace kvo
