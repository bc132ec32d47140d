// Runs the fuzz target over random inputs: seeds are fixed, so a fault comes again. `test_fuzz_cache COUNT SEED` runs
// others.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <vector>

#include "fuzz_cache.hpp"

int main(int argc, char** argv) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    const unsigned long usual = 200;  // about as long as the others without
#else
    const unsigned long usual = 1500;
#endif
    const unsigned long count = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : usual;
    const unsigned long first = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1;
    for (unsigned long seed = first; seed < first + count; ++seed) {
        std::mt19937_64 random(seed);
        std::vector<std::uint8_t> bytes(random() % 1200);
        for (std::uint8_t& byte : bytes) {
            byte = static_cast<std::uint8_t>(random());
        }
        try {
            kvo::test::run_cache_operations(bytes);
        } catch (const std::exception& fault) {
            std::printf("FAIL  seed %lu: %s\n", seed, fault.what());
            return 1;
        }
    }
    std::printf("ok    %lu inputs, seeds %lu to %lu\n", count, first, first + count - 1);
    return 0;
}
