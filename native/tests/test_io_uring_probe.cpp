#include "shim/io_uring_probe.hpp"

#include <dirent.h>

#include <cerrno>

#include "check.hpp"

using namespace kvo;

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
