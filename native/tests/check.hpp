// The native tests' own tool: a test is a function, a failed check says where and what and ends the test.
#pragma once

#include <concepts>
#include <string>
#include <vector>

namespace kvo::test {

struct Test {
    const char* name;
    void (*body)();
};

// Returns all tests, in the order in which the file has them.
std::vector<Test>& all_tests();

struct Registration {
    Registration(const char* name, void (*body)());
};

// Defined in check.cpp: the macros are expanded some thousand times, and an inline body would be compiled as often.
[[noreturn]] void fail(const char* file, int line, const std::string& what);
[[noreturn]] void fail(const char* file, int line, const char* what);
[[noreturn]] void fail_equal(const char* file, int line, const char* text, const std::string& left,
                             const std::string& right);

std::string shown(double value);

template <typename Value>
std::string shown(const Value& value) {
    if constexpr (std::integral<Value>) {
        return std::to_string(value);
    } else if constexpr (std::floating_point<Value>) {
        return shown(static_cast<double>(value));
    } else if constexpr (requires { std::string(value); }) {
        return std::string(value);
    } else {
        return "?";
    }
}

template <typename Left, typename Right>
void check_equal(const Left& left, const Right& right, const char* text, const char* file, int line) {
    if (!(left == right)) {
        fail_equal(file, line, text, shown(left), shown(right));
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
