#include "shim/cpu_features.hpp"

#include <algorithm>
#include <barrier>
#include <thread>

#include "check.hpp"

using namespace kvo;

// First in this file, so that the threads race for the very first read.
TEST(threads_may_race_for_the_first_read) {
    constexpr int kThreads = 8;
    std::barrier start(kThreads);
    std::vector<const CpuFeatures*> seen(kThreads);
    {
        std::vector<std::jthread> threads;
        for (std::size_t i = 0; i < kThreads; ++i) {
            threads.emplace_back([&, i] {
                start.arrive_and_wait();
                seen[i] = &cpu_features();
            });
        }
    }
    CHECK(std::ranges::all_of(seen, [&](const CpuFeatures* features) { return features == seen[0]; }));
}

TEST(bits_become_features) {
    X86Identity identity;
    identity.leaf1_ecx = 1u << 19;
    identity.leaf7_ebx = 1u << 29 | 1u << 5;
    identity.saved_state = 0x7;
    const std::vector<std::string_view> expected = {"sse4_1", "sha_ni", "avx2"};
    CHECK(decode_x86(identity).names() == expected);
    CHECK(decode_x86({}).names().empty());
}

TEST(wide_registers_that_the_kernel_does_not_save_do_not_count) {
    X86Identity identity;
    identity.leaf7_ebx = 1u << 5 | 1u << 16;  // avx2, avx512f
    identity.saved_state = 0x1;
    CHECK(!decode_x86(identity).has(CpuFeature::avx2));
    identity.saved_state = 0x7;
    CHECK(decode_x86(identity).has(CpuFeature::avx2));
    CHECK(!decode_x86(identity).has(CpuFeature::avx512f));
    identity.saved_state = 0xe7;
    CHECK(decode_x86(identity).has(CpuFeature::avx512f));
}

// The compiler's own runtime reads the same registers: it must agree where it has a name for the feature.
TEST(the_compiler_sees_the_same_machine) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    CHECK_EQUAL(cpu_features().has(CpuFeature::sse4_1), __builtin_cpu_supports("sse4.1") != 0);
    CHECK_EQUAL(cpu_features().has(CpuFeature::avx2), __builtin_cpu_supports("avx2") != 0);
    CHECK_EQUAL(cpu_features().has(CpuFeature::avx512f), __builtin_cpu_supports("avx512f") != 0);
    CHECK_EQUAL(cpu_features().has(CpuFeature::avx512vbmi), __builtin_cpu_supports("avx512vbmi") != 0);
    CHECK_EQUAL(cpu_features().has(CpuFeature::vpclmulqdq), __builtin_cpu_supports("vpclmulqdq") != 0);
    CHECK_EQUAL(cpu_architecture(), "x86_64");
#endif
}
