// Runs all tests of one executable. With `--one-thread` they fail if one of them has started a thread.
#include <sys/single_threaded.h>

#include <cstdio>
#include <exception>
#include <string_view>

#include "check.hpp"

int main(int count, char** arguments) {
    using namespace std::string_view_literals;
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
    if (count > 1 && arguments[1] == "--one-thread"sv && __libc_single_threaded == 0) {
        ++failed;
        std::printf("FAIL  a test has started a thread: it does not belong to those of ONE_THREAD in CMakeLists.txt\n");
    }
    const bool ran_any = !kvo::test::all_tests().empty();
    return failed == 0 && ran_any ? 0 : 1;
}
