// Runs all tests of one executable.
#include <cstdio>
#include <exception>

#include "check.hpp"

int main() {
    int failed = 0;
    for (const auto& [name, body] : kvo::test::all_tests()) {
        try {
            body();
            std::printf("ok    %s\n", name);
        } catch (const std::exception& fault) {
            ++failed;
            std::printf("FAIL  %s: %s\n", name, fault.what());
        }
    }
    const bool ran_any = !kvo::test::all_tests().empty();
    return failed == 0 && ran_any ? 0 : 1;
}
