#include "link/seal_library.hpp"

#include "check.hpp"
#include "link/sealing.hpp"

using namespace kvo;

// What a process uses once it uses for good: the refusals have a process of their own, test_seal_library_refused.
TEST(a_newer_library_that_agrees_with_the_machines_seals_from_then_on) {
    const Libcrypto* const before = seal_library().value();
    Result<Sealing> sealing = Sealing::make(*before, SealKey{}, Sealing::Way::seal);
    CHECK(sealing.ok());
    CHECK(use_seal_library(LIBCRYPTO_STUB_NEWER).value());
    CHECK(seal_library().value()->file == LIBCRYPTO_STUB_NEWER);

    // What was made before goes on as it was.
    CHECK(sealing.value().begin().ok());
    CHECK(sealing.value().finish().ok());

    CHECK(use_seal_library(LIBCRYPTO_STUB_NEWER).value());
    CHECK(use_seal_library(LIBCRYPTO_STUB_OTHER).fault().code() == Code::invalid);
    CHECK(seal_library().value()->file == LIBCRYPTO_STUB_NEWER);
}
