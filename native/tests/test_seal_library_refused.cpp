#include "check.hpp"
#include "link/seal_library.hpp"

using namespace kvo;

namespace {

// What it says about a file that it does not use.
std::string refusal_of(const std::string& file, Code code) {
    const Libcrypto* const before = seal_library().value();
    const Result<bool> is_used = use_seal_library(file);
    CHECK(!is_used.ok());
    CHECK(is_used.fault().code() == code);
    CHECK(seal_library().value() == before);
    return is_used.fault().message();
}

}  // namespace

TEST(a_library_that_seals_otherwise_is_refused) {
    CHECK(refusal_of(LIBCRYPTO_STUB_OTHER, Code::unavailable) == "stub 15.0 does not seal as the standard says");
}

TEST(a_library_that_is_not_newer_is_left_alone) {
    const Libcrypto* const before = seal_library().value();
    CHECK(!use_seal_library(LIBCRYPTO_STUB_OLDER).value());
    CHECK(seal_library().value() == before);
}

TEST(a_library_that_is_not_there_is_refused) {
    CHECK(refusal_of("/nowhere/libcrypto.so.3", Code::unavailable).find("/nowhere/libcrypto.so.3") !=
          std::string::npos);
}

TEST(a_relative_path_is_never_opened) {
    CHECK(refusal_of("libcrypto.so.3", Code::invalid) ==
          "a libcrypto is named by its absolute path, not libcrypto.so.3");
}
