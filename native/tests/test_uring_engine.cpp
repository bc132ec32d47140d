#include "io/uring_engine.hpp"

#include <cstdio>

#include "check.hpp"
#include "io_contract.hpp"
#include "shim/io_uring_probe.hpp"

using namespace kvo;

TEST(a_ring_is_an_io_engine) {
    Result<std::unique_ptr<IoEngine>> engine = UringEngine::create(16);
    if (!engine.ok()) {
        // The kernel's own answer, and not only ours.
        std::printf("io_uring is not to be had here: %s\n", engine.fault().message().c_str());
        CHECK(engine.fault().code() == Code::unavailable);
        return;
    }
    CHECK(probe_io_uring().ok());
    test::check_io_contract(std::move(engine.value()));
}

TEST(a_ring_of_one_is_an_io_engine) {
    if (Result<std::unique_ptr<IoEngine>> engine = UringEngine::create(1); engine.ok()) {
        CHECK_EQUAL(engine.value()->depth(), std::size_t{1});
        test::check_io_contract(std::move(engine.value()));
    }
}

TEST(a_ring_that_the_kernel_refuses_is_unavailable_in_words) {
    const Result<std::unique_ptr<IoEngine>> engine = UringEngine::create(1U << 20);
    CHECK(!engine.ok());
    CHECK(engine.fault().code() == Code::unavailable);
    CHECK(!engine.fault().message().empty());
}
