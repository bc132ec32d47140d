#include "shim/cpu_features.hpp"

#include <array>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvo {
namespace {

struct Name {
    CpuFeature feature;
    std::string_view text;
};

constexpr std::array kNames = {
    Name{CpuFeature::sse4_1, "sse4_1"},       Name{CpuFeature::sha_ni, "sha_ni"},
    Name{CpuFeature::pclmulqdq, "pclmulqdq"}, Name{CpuFeature::avx2, "avx2"},
    Name{CpuFeature::vaes, "vaes"},           Name{CpuFeature::vpclmulqdq, "vpclmulqdq"},
    Name{CpuFeature::avx512f, "avx512f"},     Name{CpuFeature::avx512bw, "avx512bw"},
    Name{CpuFeature::avx512vl, "avx512vl"},   Name{CpuFeature::avx512vbmi, "avx512vbmi"},
    Name{CpuFeature::arm_aes, "arm_aes"},     Name{CpuFeature::arm_pmull, "arm_pmull"},
    Name{CpuFeature::arm_sha2, "arm_sha2"},   Name{CpuFeature::arm_sve, "arm_sve"},
};

// A kernel that does not save the wide registers makes their instructions fault, whatever CPUID says.
constexpr std::uint64_t kSavesXmm = 1 << 1;
constexpr std::uint64_t kSavesYmm = kSavesXmm | 1 << 2;
constexpr std::uint64_t kSavesZmm = kSavesYmm | 7 << 5;

struct X86Bit {
    CpuFeature feature;
    std::uint32_t X86Identity::* word;
    unsigned bit;
    std::uint64_t needs_state;
};

// Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, CPUID.
constexpr std::array kX86Bits = {
    X86Bit{CpuFeature::pclmulqdq, &X86Identity::leaf1_ecx, 1, 0},
    X86Bit{CpuFeature::sse4_1, &X86Identity::leaf1_ecx, 19, 0},
    X86Bit{CpuFeature::avx2, &X86Identity::leaf7_ebx, 5, kSavesYmm},
    X86Bit{CpuFeature::avx512f, &X86Identity::leaf7_ebx, 16, kSavesZmm},
    X86Bit{CpuFeature::sha_ni, &X86Identity::leaf7_ebx, 29, 0},
    X86Bit{CpuFeature::avx512bw, &X86Identity::leaf7_ebx, 30, kSavesZmm},
    X86Bit{CpuFeature::avx512vl, &X86Identity::leaf7_ebx, 31, kSavesZmm},
    X86Bit{CpuFeature::avx512vbmi, &X86Identity::leaf7_ecx, 1, kSavesZmm},
    X86Bit{CpuFeature::vaes, &X86Identity::leaf7_ecx, 9, kSavesYmm},
    X86Bit{CpuFeature::vpclmulqdq, &X86Identity::leaf7_ecx, 10, kSavesYmm},
};

#if defined(__x86_64__)

CpuFeatures read_features() noexcept {
    constexpr std::uint32_t kOsSavesState = 1u << 27;  // XGETBV exists and says which
    X86Identity identity;
    std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
        identity.leaf1_ecx = ecx;
    }
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
        identity.leaf7_ebx = ebx;
        identity.leaf7_ecx = ecx;
    }
    if ((identity.leaf1_ecx & kOsSavesState) != 0) {
        std::uint32_t low = 0, high = 0;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        identity.saved_state = std::uint64_t{high} << 32 | low;
    }
    return decode_x86(identity);
}

#elif defined(__aarch64__)

CpuFeatures read_features() noexcept {
    const unsigned long kernel_says = getauxval(AT_HWCAP);
    CpuFeatures features;
    const auto add_if = [&](CpuFeature feature, unsigned long bit) {
        if ((kernel_says & bit) != 0) {
            features.add(feature);
        }
    };
    add_if(CpuFeature::arm_aes, HWCAP_AES);
    add_if(CpuFeature::arm_pmull, HWCAP_PMULL);
    add_if(CpuFeature::arm_sha2, HWCAP_SHA2);
    add_if(CpuFeature::arm_sve, HWCAP_SVE);
    return features;
}

#else

CpuFeatures read_features() noexcept { return {}; }

#endif

}  // namespace

std::vector<std::string_view> CpuFeatures::names() const {
    std::vector<std::string_view> names;
    for (const Name& name : kNames) {
        if (has(name.feature)) {
            names.push_back(name.text);
        }
    }
    return names;
}

CpuFeatures decode_x86(const X86Identity& identity) noexcept {
    CpuFeatures features;
    for (const X86Bit& row : kX86Bits) {
        const bool is_built_in = (identity.*row.word >> row.bit & 1) != 0;
        if (is_built_in && (identity.saved_state & row.needs_state) == row.needs_state) {
            features.add(row.feature);
        }
    }
    return features;
}

const CpuFeatures& cpu_features() noexcept {
    static const CpuFeatures features = read_features();
    return features;
}

std::string_view cpu_architecture() noexcept {
#if defined(__x86_64__)
    return "x86_64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "other";
#endif
}

}  // namespace kvo
