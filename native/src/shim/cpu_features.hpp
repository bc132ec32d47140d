// The processor features that this machine has and the kernel lets us use.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace kvo {

enum class CpuFeature : std::uint8_t {
    sse4_1,
    sha_ni,
    pclmulqdq,
    avx2,
    vaes,
    vpclmulqdq,
    avx512f,
    avx512bw,
    avx512vl,
    avx512vbmi,
    arm_aes,
    arm_pmull,
    arm_sha2,
    arm_sve,
};

class CpuFeatures {
public:
    bool has(CpuFeature feature) const noexcept { return (bits_ >> static_cast<unsigned>(feature) & 1) != 0; }
    void add(CpuFeature feature) noexcept { bits_ |= std::uint32_t{1} << static_cast<unsigned>(feature); }

    // Names of the features, in the order of the enumeration.
    std::vector<std::string_view> names() const;

private:
    std::uint32_t bits_ = 0;
};

// The registers of x86's CPUID that the features are read from, and the register state the kernel saves (XCR0).
struct X86Identity {
    std::uint32_t leaf1_ecx = 0;
    std::uint32_t leaf7_ebx = 0;
    std::uint32_t leaf7_ecx = 0;
    std::uint64_t saved_state = 0;
};

// A pure function, so that tests can cover processors that we do not have.
CpuFeatures decode_x86(const X86Identity& identity) noexcept;

// Features of this machine. The first call reads them, and any thread may make it.
const CpuFeatures& cpu_features() noexcept;

// "x86_64", "aarch64" or "other".
std::string_view cpu_architecture() noexcept;

}  // namespace kvo
