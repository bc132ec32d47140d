#include "hash/block_hash.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace kvo {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie in memory");

constexpr std::size_t kCountsAt = kDigestBytes;
constexpr std::size_t kTokensAt = kCountsAt + 2 * sizeof(std::uint32_t);

struct ExtraSize {
    std::size_t largest = 0;
    Status status;
};

Status invalid(std::string message) { return {Code::invalid, std::move(message)}; }

ExtraSize check_extras(const BlockExtras& extras, std::size_t block_count) {
    if (extras.ends.empty() && (block_count == 0 || extras.bytes.empty())) {
        return extras.bytes.empty() ? ExtraSize{}
                                    : ExtraSize{0, invalid("extras were given, but there is no full block")};
    }
    if (extras.ends.size() != block_count) {
        return {0, invalid("extra_ends has " + std::to_string(extras.ends.size()) + " entries, the tokens make " +
                           std::to_string(block_count) + " full blocks")};
    }
    ExtraSize size;
    std::uint64_t begin = 0;
    for (const std::uint64_t end : extras.ends) {
        if (end < begin || end > extras.bytes.size()) {
            return {0, invalid("extra_ends must not fall and not pass the " + std::to_string(extras.bytes.size()) +
                               " bytes of extras: " + std::to_string(end) + " follows " + std::to_string(begin))};
        }
        size.largest = std::max(size.largest, static_cast<std::size_t>(end - begin));
        begin = end;
    }
    if (begin != extras.bytes.size()) {
        return {0, invalid("extra_ends end at " + std::to_string(begin) + ", extras has " +
                           std::to_string(extras.bytes.size()) + " bytes")};
    }
    if (size.largest > std::numeric_limits<std::uint32_t>::max()) {
        return {0, invalid("a block's extra bytes must be fewer than 2**32")};
    }
    return size;
}

void write_counts(std::uint8_t* message, std::uint32_t token_count, std::size_t extra_bytes) noexcept {
    const std::uint32_t counts[] = {token_count, static_cast<std::uint32_t>(extra_bytes)};
    std::memcpy(message + kCountsAt, counts, sizeof counts);
}

}  // namespace

Status hash_blocks(std::span<const std::uint32_t> tokens, std::uint32_t block_size,
                   std::span<const std::uint8_t, kDigestBytes> parent, BlockExtras extras, std::span<std::uint8_t> out,
                   const Sha256Path& path) {
    if (block_size == 0) {
        return invalid("block_size must be positive");
    }
    const std::size_t block_count = full_blocks(tokens.size(), block_size);
    if (out.size() != block_count * kDigestBytes) {
        return invalid("out must have 32 bytes for each full block");
    }
    ExtraSize extra_size = check_extras(extras, block_count);
    if (!extra_size.status.ok() || block_count == 0) {
        return std::move(extra_size.status);
    }

    // One buffer holds every block's whole message in turn, so that each digest is one call of the compression.
    const std::size_t token_bytes = std::size_t{block_size} * sizeof(std::uint32_t);
    const std::size_t extra_at = kTokensAt + token_bytes;
    std::vector<std::uint8_t> buffer(sha256_padded_bytes(extra_at + extra_size.largest));
    std::uint8_t* const message = buffer.data();
    const std::uint8_t* previous = parent.data();
    std::size_t extra_begin = 0;
    for (std::size_t i = 0; i < block_count; ++i) {
        const std::size_t extra_end = extras.ends.empty() ? 0 : extras.ends[i];
        const std::size_t extra_bytes = extra_end - extra_begin;
        std::memcpy(message, previous, kDigestBytes);
        write_counts(message, block_size, extra_bytes);
        std::memcpy(message + kTokensAt, tokens.data() + i * block_size, token_bytes);
        std::copy_n(extras.bytes.data() + extra_begin, extra_bytes, message + extra_at);
        sha256_pad(message, extra_at + extra_bytes);
        const auto digest = out.subspan(i * kDigestBytes).first<kDigestBytes>();
        sha256_padded(message, sha256_padded_bytes(extra_at + extra_bytes), digest, path);
        previous = digest.data();
        extra_begin = extra_end;
    }
    return {};
}

}  // namespace kvo
