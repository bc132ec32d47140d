#include "link/libcrypto.hpp"

#include "check.hpp"

using namespace kvo;

TEST(the_machines_says_its_version_and_its_file) {
    const Result<Libcrypto> found = open_machine_libcrypto();
    CHECK(found.ok());
    CHECK(found.value().version >= 0x10100000UL);
    CHECK(found.value().name.starts_with("OpenSSL "));
    CHECK(found.value().file.find("/libcrypto.so") != std::string::npos);
}

TEST(a_packaged_one_is_told_to_read_no_configuration) {
    const Result<Libcrypto> found = open_packaged_libcrypto(LIBCRYPTO_STUB_NEWER);
    CHECK(found.ok());
    CHECK(found.value().name == "stub 15.0");
    CHECK(found.value().file == LIBCRYPTO_STUB_NEWER);
    void* const state = found.value().calls.new_state();  // the stub has none before it was told
    CHECK(state != nullptr);
    found.value().calls.free_state(state);
}

TEST(what_is_no_libcrypto_is_unavailable) {
    for (const char* const file : {"/nowhere/libcrypto.so.3", "libm.so.6"}) {
        const Result<Libcrypto> found = open_packaged_libcrypto(file);
        CHECK(!found.ok());
        CHECK(found.fault().code() == Code::unavailable);
        CHECK(found.fault().message().find(file) != std::string::npos);
    }
}
