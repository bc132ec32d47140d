#include "digest/digest_paths.hpp"

namespace kvo {

// A word times its key has 124 bits, so sixteen of them fit 128. Two sums, because each addition waits for the last.
WordSum sum_blocks_portable(const std::uint8_t* source, std::uint8_t* copy, std::size_t first_word,
                            std::size_t block_count) noexcept {
    static_assert(kDigestBlockWords <= digest_field::kProductsBeforeCarry);
    WordSum sum = 0;
    const std::uint64_t* keys = kWordKeys.data() + first_word;
    for (; block_count > 0; --block_count, source += kDigestBlockBytes, keys += kDigestBlockWords) {
        std::uint64_t words[kDigestBlockWords];
        std::memcpy(words, source, sizeof words);
        if (copy != nullptr) {
            std::memcpy(copy, words, sizeof words);
            copy += kDigestBlockBytes;
        }
        digest_field::Unsigned even = 0, odd = 0;
        for (std::size_t i = 0; i < kDigestBlockWords; i += 2) {
            even += digest_field::Unsigned{words[i]} * keys[i];
            odd += digest_field::Unsigned{words[i + 1]} * keys[i + 1];
        }
        sum += digest_field::shorten(even + odd);
    }
    return sum;
}

}  // namespace kvo
