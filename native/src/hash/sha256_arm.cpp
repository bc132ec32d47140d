#if defined(__aarch64__)

#include <arm_neon.h>

#include "hash/sha256_paths.hpp"

namespace kvo {

// Four rounds take two instructions: one makes the new (a b c d), one the new (e f g h), both from the old pair.
__attribute__((target("+crypto"))) void sha256_compress_armv8(Sha256State& state, const std::uint8_t* blocks,
                                                              std::size_t block_count) noexcept {
    uint32x4_t abcd = vld1q_u32(state.data());
    uint32x4_t efgh = vld1q_u32(state.data() + 4);
    for (; block_count > 0; --block_count, blocks += kSha256BlockBytes) {
        const uint32x4_t abcd_before = abcd;
        const uint32x4_t efgh_before = efgh;
        uint32x4_t schedule[4];  // a ring of the last sixteen message words
#pragma GCC unroll 16
        for (std::size_t i = 0; i < 16; ++i) {
            uint32x4_t& current = schedule[i % 4];
            if (i < 4) {
                current = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(blocks + 16 * i)));
            } else {
                const uint32x4_t sum = vsha256su0q_u32(current, schedule[(i + 1) % 4]);
                current = vsha256su1q_u32(sum, schedule[(i + 2) % 4], schedule[(i + 3) % 4]);
            }
            const uint32x4_t keyed = vaddq_u32(current, vld1q_u32(kSha256Rounds.data() + 4 * i));
            const uint32x4_t abcd_old = abcd;
            abcd = vsha256hq_u32(abcd, efgh, keyed);
            efgh = vsha256h2q_u32(efgh, abcd_old, keyed);
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state.data(), abcd);
    vst1q_u32(state.data() + 4, efgh);
}

}  // namespace kvo

#endif
