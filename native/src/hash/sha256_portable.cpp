#include "hash/sha256_paths.hpp"

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

}  // namespace kvo
