#include "copy/cuda_events.hpp"

#include "check.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;

TEST(an_event_comes_back_with_its_last_handle) {
    fake::Program program(FAKE_CUDA, {});
    CudaEventPool pool(program.api());
    SharedEvent first = pool.take().value();
    const SharedEvent second = pool.take().value();
    CHECK(first->get() != second->get());
    const CudaEvent event = first->get();
    const SharedEvent other_handle = first;
    first.reset();
    CHECK(pool.take().value()->get() != event);
    {
        const SharedEvent last = std::move(other_handle);
    }
    CHECK_EQUAL(program.control().live().events, 3u);
}

TEST(what_is_filled_is_used_and_given_back) {
    fake::Program program(FAKE_CUDA, {});
    CudaEventPool pool(program.api());
    CHECK(pool.fill(5).ok());
    CHECK_EQUAL(program.control().live().events, 5u);
    {
        const SharedEvent used = pool.take().value();
        CHECK_EQUAL(program.control().live().events, 5u);
    }
    pool.destroy();
    CHECK_EQUAL(program.control().live().events, 0u);
}

TEST(a_driver_that_has_none_is_quoted) {
    fake::Program program(FAKE_CUDA, {});
    program.control().exempt_thread(false);
    program.control().arm_fault({.per_mille = 1000, .status = fake::kOutOfMemory});
    CudaEventPool pool(program.api());
    CHECK_EQUAL(pool.take().fault().message(), "cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY");
    CHECK(!pool.fill(1).ok());
    program.control().arm_fault({});
    program.control().exempt_thread(true);
    CHECK(pool.take().ok());
}
