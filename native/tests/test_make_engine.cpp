#include "io/make_engine.hpp"

#include <string>

#include "check.hpp"
#include "shim/io_uring_probe.hpp"

using namespace kvo;

TEST(the_kernel_decides_which_engine_auto_is) {
    const Result<MadeEngine> made = make_io_engine("auto", 8);
    CHECK(made.ok());
    const bool has_ring = probe_io_uring().ok();
    CHECK_EQUAL(std::string(made.value().engine->name()), has_ring ? "io_uring" : "threads");
    CHECK_EQUAL(made.value().why_no_uring.empty(), has_ring);
}

TEST(threads_are_had_by_name) {
    const Result<MadeEngine> made = make_io_engine("threads", 3);
    CHECK(made.ok());
    CHECK_EQUAL(std::string(made.value().engine->name()), "threads");
    CHECK_EQUAL(made.value().engine->depth(), std::size_t{3});
}

TEST(wrong_names_and_depths_say_what_is_allowed) {
    CHECK(make_io_engine("aio", 8).fault().message().find("auto, io_uring or threads") != std::string::npos);
    CHECK(make_io_engine("auto", 0).fault().message().find("1 to 256, not 0") != std::string::npos);
    CHECK(make_io_engine("auto", 257).fault().code() == Code::invalid);
}
