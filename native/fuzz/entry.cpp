// Where a fuzzer comes in.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        kvo::fuzz::run({data, size});
    } catch (const std::exception& fault) {
        std::fprintf(stderr, "%s\n", fault.what());
        std::abort();
    }
    return 0;
}
