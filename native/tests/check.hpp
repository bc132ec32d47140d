// The native tests' own tool: a test is a function, a failed check says where and what and ends the test.
#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvo::test {

struct Test {
    std::string name;
    std::function<void()> body;
};

// In the order of the file.
inline std::vector<Test>& all_tests() {
    static std::vector<Test> tests;
    return tests;
}

struct Registration {
    Registration(const char* name, void (*body)()) { all_tests().push_back({name, body}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename Left, typename Right>
void check_equal(const Left& left, const Right& right, const char* text, const char* file, int line) {
    if (!(left == right)) {
        std::ostringstream what;
        what << text << ": ";
        if constexpr (requires { what << left << right; }) {
            what << left << " is not " << right;
        } else {
            what << "not equal";
        }
        fail(file, line, what.str());
    }
}

}  // namespace kvo::test

#define TEST(name)                                                       \
    static void name();                                                  \
    static const kvo::test::Registration name##_registered{#name, name}; \
    static void name()

#define CHECK(...)                                             \
    do {                                                       \
        if (!(__VA_ARGS__)) {                                  \
            kvo::test::fail(__FILE__, __LINE__, #__VA_ARGS__); \
        }                                                      \
    } while (false)

#define CHECK_EQUAL(left, right) kvo::test::check_equal(left, right, #left " == " #right, __FILE__, __LINE__)
