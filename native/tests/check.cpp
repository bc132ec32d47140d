#include "check.hpp"

#include <sstream>
#include <stdexcept>

namespace kvo::test {

std::vector<Test>& all_tests() {
    static std::vector<Test> tests;
    return tests;
}

Registration::Registration(const char* name, void (*body)()) { all_tests().push_back({name, body}); }

void fail(const char* file, int line, const std::string& what) {
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

void fail(const char* file, int line, const char* what) { fail(file, line, std::string(what)); }

void fail_equal(const char* file, int line, const char* text, const std::string& left, const std::string& right) {
    fail(file, line, std::string(text) + ": " + left + " is not " + right);
}

std::string shown(double value) {
    std::ostringstream text;
    text << value;
    return text.str();
}

}  // namespace kvo::test
