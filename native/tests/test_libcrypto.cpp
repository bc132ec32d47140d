#include "link/libcrypto.hpp"

#include "check.hpp"

using namespace kvo;

TEST(the_machines_says_its_version_and_its_file) {
    const Result<const Libcrypto*> found = machine_libcrypto();
    CHECK(found.ok());
    CHECK(found.value()->version >= 0x10100000UL);
    CHECK(found.value()->name.starts_with("OpenSSL "));
    CHECK(found.value()->file.find("/libcrypto.so") != std::string::npos);
    CHECK(machine_libcrypto().value() == found.value());
}

TEST(a_file_that_is_not_a_libcrypto_is_unavailable) {
    for (const char* const file : {"/nowhere/libcrypto.so.3", "libm.so.6"}) {
        const Result<Libcrypto> found = open_libcrypto(file);
        CHECK(!found.ok());
        CHECK(found.fault().code() == Code::unavailable);
        CHECK(found.fault().message().find(file) != std::string::npos);
    }
}
