#include "io/uring_engine.hpp"

#include <dirent.h>

#include <cerrno>
#include <cstdio>

#include "check.hpp"
#include "io_contract.hpp"

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

namespace {

int count_open_files() {
    DIR* const folder = opendir("/proc/self/fd");
    CHECK(folder != nullptr);
    int count = 0;
    while (readdir(folder) != nullptr) {
        ++count;
    }
    closedir(folder);
    return count;
}

}  // namespace

TEST(probing_answers_and_leaves_nothing_open) {
    const int before = count_open_files();
    for (int i = 0; i < 3; ++i) {
        const Status status = probe_io_uring();
        CHECK(status.ok() || status.code() == Code::unavailable);
        CHECK_EQUAL(status.ok(), status.message().empty());
    }
    CHECK_EQUAL(count_open_files(), before);
}

TEST(refusals_are_explained_in_words) {
    CHECK(explain_io_uring_refusal(ENOSYS, -1).find("no io_uring") != std::string::npos);
    CHECK(explain_io_uring_refusal(EPERM, 2).find("kernel.io_uring_disabled=2") != std::string::npos);
    CHECK(explain_io_uring_refusal(EPERM, 0).find("seccomp") != std::string::npos);
    CHECK(explain_io_uring_refusal(EPERM, -1).find("seccomp") != std::string::npos);
    CHECK(explain_io_uring_refusal(ENOMEM, 0).find("ulimit -l") != std::string::npos);
    CHECK(explain_io_uring_refusal(EINVAL, 0).find("Invalid argument") != std::string::npos);
}
