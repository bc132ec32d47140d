#include "shim/dynamic_library.hpp"

#include "check.hpp"

using namespace kvo;

TEST(an_absent_library_is_unavailable_by_name) {
    const auto library = DynamicLibrary::open("libkvoffload_absent.so.9");
    CHECK(!library.ok());
    CHECK(library.fault().code() == Code::unavailable);
    CHECK(library.fault().message().find("libkvoffload_absent.so.9") != std::string::npos);
}

TEST(symbols_are_found_or_null) {
    const auto library = DynamicLibrary::open(DRIVER_STUB_CURRENT);
    CHECK(library.ok());
    CHECK(library.value().find("cuInit") != nullptr);
    CHECK(library.value().find("no_such_symbol") == nullptr);
}

TEST(a_function_tells_its_file) {
    const auto library = DynamicLibrary::open(DRIVER_STUB_CURRENT);
    CHECK(library.ok());
    CHECK(DynamicLibrary::file_of(library.value().find("cuInit")) == DRIVER_STUB_CURRENT);
    CHECK(DynamicLibrary::file_of(nullptr).empty());
}
