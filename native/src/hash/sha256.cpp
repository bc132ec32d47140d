#include "hash/sha256.hpp"

#include <algorithm>

#include "hash/sha256_paths.hpp"
#include "shim/cpu_features.hpp"

namespace kvo {
namespace {

// Word i of the message schedule for i >= 16; `schedule` is a ring of the last sixteen words.
inline std::uint32_t next_word(std::array<std::uint32_t, 16>& schedule, std::size_t i) noexcept {
    const std::uint32_t old15 = schedule[(i - 15) % 16];
    const std::uint32_t old2 = schedule[(i - 2) % 16];
    const std::uint32_t sigma0 = std::rotr(old15, 7) ^ std::rotr(old15, 18) ^ (old15 >> 3);
    const std::uint32_t sigma1 = std::rotr(old2, 17) ^ std::rotr(old2, 19) ^ (old2 >> 10);
    return schedule[i % 16] += sigma0 + schedule[(i - 7) % 16] + sigma1;
}

inline void compress_one(Sha256State& state, const std::uint8_t* block) noexcept {
    std::array<std::uint32_t, 16> schedule;
    auto [a, b, c, d, e, f, g, h] = state;
#pragma GCC unroll 64
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t word = i < 16 ? schedule[i] = load_big_endian(block + 4 * i) : next_word(schedule, i);
        const std::uint32_t choose = g ^ (e & (f ^ g));
        const std::uint32_t majority = (a & b) | (c & (a | b));
        const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
        const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
        const std::uint32_t step = h + sum1 + choose + kSha256Rounds[i] + word;
        h = g;
        g = f;
        f = e;
        e = d + step;
        d = c;
        c = b;
        b = a;
        a = step + sum0 + majority;
    }
    const Sha256State added = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < state.size(); ++i) {
        state[i] += added[i];
    }
}

}  // namespace

void sha256_compress_portable(Sha256State& state, const std::uint8_t* blocks, std::size_t block_count) noexcept {
    for (std::size_t i = 0; i < block_count; ++i) {
        compress_one(state, blocks + i * kSha256BlockBytes);
    }
}

namespace {

// The first 32 bits of the fractional parts of the square roots of the first 8 primes (FIPS 180-4, 5.3.3).
constexpr Sha256State kInitialState = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr Sha256Path kPortable = {sha256_compress_portable, "portable"};

void write_digest(const Sha256State& state, std::span<std::uint8_t, kDigestBytes> out) noexcept {
    for (std::size_t i = 0; i < state.size(); ++i) {
        store_big_endian(out.data() + 4 * i, state[i]);
    }
}

// Pads the last `buffered_bytes` of a message, which lie in `buffer`: a one bit, zeros, the message's length in bits.
void close_message(std::uint8_t* buffer, std::size_t buffered_bytes, std::size_t message_bytes) noexcept {
    std::uint8_t* const end = buffer + sha256_padded_bytes(buffered_bytes);
    buffer[buffered_bytes] = 0x80;
    std::fill(buffer + buffered_bytes + 1, end - 8, std::uint8_t{0});
    const std::uint64_t message_bits = std::uint64_t{message_bytes} * 8;
    store_big_endian(end - 8, static_cast<std::uint32_t>(message_bits >> 32));
    store_big_endian(end - 4, static_cast<std::uint32_t>(message_bits));
}

}  // namespace

std::span<const Sha256Path> sha256_paths() noexcept {
#if defined(__x86_64__)
    static constexpr std::array kPaths = {Sha256Path{sha256_compress_sha_ni, "sha_ni"}, kPortable};
    const bool has_instructions = cpu_features().has(CpuFeature::sha_ni) && cpu_features().has(CpuFeature::sse4_1);
#elif defined(__aarch64__)
    static constexpr std::array kPaths = {Sha256Path{sha256_compress_armv8, "armv8_sha2"}, kPortable};
    const bool has_instructions = cpu_features().has(CpuFeature::arm_sha2);
#else
    static constexpr std::array kPaths = {kPortable};
    const bool has_instructions = true;
#endif
    return has_instructions ? std::span(kPaths) : std::span(kPaths).last(1);
}

void sha256_pad(std::uint8_t* buffer, std::size_t message_bytes) noexcept {
    close_message(buffer, message_bytes, message_bytes);
}

void sha256_padded(const std::uint8_t* buffer, std::size_t padded_bytes, std::span<std::uint8_t, kDigestBytes> out,
                   const Sha256Path& path) noexcept {
    Sha256State state = kInitialState;
    path.compress(state, buffer, padded_bytes / kSha256BlockBytes);
    write_digest(state, out);
}

Digest sha256(std::span<const std::uint8_t> message, const Sha256Path& path) noexcept {
    const std::size_t tail_bytes = message.size() % kSha256BlockBytes;
    std::array<std::uint8_t, 2 * kSha256BlockBytes> tail;
    std::copy_n(message.end() - static_cast<std::ptrdiff_t>(tail_bytes), tail_bytes, tail.begin());
    close_message(tail.data(), tail_bytes, message.size());

    Sha256State state = kInitialState;
    path.compress(state, message.data(), message.size() / kSha256BlockBytes);
    path.compress(state, tail.data(), sha256_padded_bytes(tail_bytes) / kSha256BlockBytes);
    Digest digest;
    write_digest(state, digest);
    return digest;
}

}  // namespace kvo
