// SHA-256 (FIPS 180-4) of messages that lie in memory as a whole, by the fastest instructions this machine has.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvo {

inline constexpr std::size_t kDigestBytes = 32;
inline constexpr std::size_t kSha256BlockBytes = 64;

using Digest = std::array<std::uint8_t, kDigestBytes>;
using Sha256State = std::array<std::uint32_t, 8>;

// Takes `block_count` blocks of 64 bytes into `state`. `blocks` needs no alignment.
using Sha256Compress = void (*)(Sha256State& state, const std::uint8_t* blocks, std::size_t block_count) noexcept;

struct Sha256Path {
    Sha256Compress compress;
    const char* name;  // "sha_ni", "armv8_sha2" or "portable"
};

// Every path this machine can run, the fastest first, the portable one last. Safe to call from any thread.
std::span<const Sha256Path> sha256_paths() noexcept;

// The path that this machine uses: the first, which is the fastest.
inline const Sha256Path& sha256_path() noexcept { return sha256_paths().front(); }

Digest sha256(std::span<const std::uint8_t> message, const Sha256Path& path = sha256_path()) noexcept;

// For a caller that builds many messages in one buffer: the bytes a message of this length takes with its padding,
constexpr std::size_t sha256_padded_bytes(std::size_t message_bytes) noexcept {
    constexpr std::size_t kEnd = 1 + 8;  // the closing bit and the length
    return (message_bytes + kEnd + kSha256BlockBytes - 1) / kSha256BlockBytes * kSha256BlockBytes;
}

// the padding itself, written behind the message, up to sha256_padded_bytes(message_bytes),
void sha256_pad(std::uint8_t* buffer, std::size_t message_bytes) noexcept;

// and the digest of a padded message.
void sha256_padded(const std::uint8_t* buffer, std::size_t padded_bytes, std::span<std::uint8_t, kDigestBytes> out,
                   const Sha256Path& path = sha256_path()) noexcept;

}  // namespace kvo
