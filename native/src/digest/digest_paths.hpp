// The implementations of the digest's inner loop, and what they share. For digest*.cpp only.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "digest/digest.hpp"
#include "digest/digest_field.hpp"

namespace kvo {

static_assert(std::endian::native == std::endian::little, "words are hashed as they lie in memory");

inline constexpr std::size_t kDigestBlockWords = kDigestBlockBytes / kDigestWordBytes;

alignas(64) inline constexpr auto kWordKeys = [] {
    std::array<std::uint64_t, kDigestChunkWords> keys{};
    for (std::size_t word = 0; word < keys.size(); ++word) {
        keys[word] = word_key(word);
    }
    return keys;
}();

WordSum sum_blocks_portable(const std::uint8_t* source, std::uint8_t* copy, std::size_t first_word,
                            std::size_t block_count) noexcept;

#if defined(__x86_64__)
WordSum sum_blocks_avx512(const std::uint8_t* source, std::uint8_t* copy, std::size_t first_word,
                          std::size_t block_count) noexcept;
WordSum sum_blocks_avx2(const std::uint8_t* source, std::uint8_t* copy, std::size_t first_word,
                        std::size_t block_count) noexcept;
#endif

}  // namespace kvo
