#include "io/io_engine.hpp"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <string>

#include "check.hpp"
#include "child_process.hpp"
#include "io/uring_engine.hpp"

using namespace kvo;
using test::ChildProcess;
using test::Line;

namespace {

// Forbids io_uring as container runtimes do by default. False: this system has no such filters.
bool forbid_io_uring() {
    sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{std::size(steps), steps};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace

TEST(where_io_uring_is_forbidden_auto_is_threads_and_says_why) {
    constexpr int kNoFilters = 77;
    ChildProcess child([](const Line&) {
        if (!forbid_io_uring()) {
            return kNoFilters;
        }
        const Result<MadeEngine> made = make_io_engine("auto", 8);
        const bool is_right = made.ok() && made.value().engine->name() == std::string("threads") &&
                              made.value().why_no_uring.find("not permitted here") != std::string::npos;
        return is_right && !make_io_engine("io_uring", 8).ok() ? 0 : 1;
    });
    const int code = child.wait_exit();
    if (code == kNoFilters) {
        std::printf("seccomp filters are missing here\n");
        return;
    }
    CHECK_EQUAL(code, 0);
}

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
