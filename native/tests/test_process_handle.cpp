#include "shim/process_handle.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "check.hpp"
#include "child_process.hpp"
#include "made_up_files.hpp"

using namespace kvo;
using test::ChildProcess;
using test::Line;

namespace {

ChildProcess waiting_child() {
    return ChildProcess([](const Line& line) {
        line.await();
        return 0;
    });
}

ProcessHandle open_child(const ChildProcess& child) {
    const Result<ProcessIdentity> identity = identify_process(child.pid());
    CHECK(identity.ok());
    Result<ProcessHandle> handle = ProcessHandle::open(identity.value());
    CHECK(handle.ok());
    return std::move(handle.value());
}

}  // namespace

TEST(the_start_time_is_field_22_whatever_the_name_holds) {
    const std::string rest = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18";  // fields 3 to 21
    struct Case {
        std::string stat;
        std::optional<std::uint64_t> ticks;
    };
    const std::vector<Case> cases = {
        {"7 (cat)" + rest + " 987654 23 24\n", 987654},
        {"7 (a) b (c)" + rest + " 18446744073709551615 1\n", UINT64_MAX},
        {"7 ()) S 9 9)" + rest + " 0", 0},
        {"7 (cat)" + rest + " -1 2", std::nullopt},
        {"7 (cat)" + rest + " 12x 2", std::nullopt},
        {"7 (cat)" + rest, std::nullopt},
        {"7 cat S 1", std::nullopt},
        {"", std::nullopt},
    };
    for (const Case& each : cases) {
        CHECK_EQUAL(parse_start_ticks(each.stat).value_or(4711), each.ticks.value_or(4711));
    }
}

TEST(this_process_is_the_same_at_every_look) {
    const Result<ProcessIdentity> first = identify_process(getpid());
    const Result<ProcessIdentity> second = identify_process(getpid());
    CHECK(first.ok() && second.ok());
    CHECK(first.value() == second.value());
    const Result<ProcessHandle> handle = ProcessHandle::open(first.value());
    CHECK(handle.ok());
    CHECK(!handle.value().has_exited());
    CHECK_EQUAL(handle.value().pid(), getpid());
}

TEST(a_zombie_has_exited_and_stays_so_after_its_reaping) {
    ChildProcess child = waiting_child();
    const ProcessHandle handle = open_child(child);
    CHECK(!handle.has_exited());
    child.send_signal(SIGSTOP);
    child.wait_stopped();
    CHECK(!handle.has_exited());
    child.send_signal(SIGKILL);
    child.wait_zombie();
    CHECK(handle.has_exited());
    child.wait_exit();
    CHECK(handle.has_exited());
}

TEST(a_number_used_again_is_not_taken_for_the_old_process) {
    ChildProcess child = waiting_child();
    ProcessIdentity recycled = identify_process(child.pid()).value();
    recycled.start_ticks -= 1;
    CHECK(ProcessHandle::open(recycled).fault().code() == Code::unavailable);

    const ProcessIdentity identity = identify_process(child.pid()).value();
    child.line().tell();
    child.wait_zombie();
    const Result<ProcessHandle> zombie = ProcessHandle::open(identity);
    CHECK(zombie.ok());  // its number is not free yet
    CHECK(zombie.value().has_exited());
    child.wait_exit();
    CHECK(ProcessHandle::open(identity).fault().code() == Code::unavailable);
    CHECK(identify_process(child.pid()).fault().code() == Code::unavailable);
}

// A process that is wrongly called dead may still be copying.
TEST(what_cannot_be_looked_at_is_not_called_dead) {
    ChildProcess child = waiting_child();
    const ProcessIdentity identity = identify_process(child.pid()).value();
    const int free_number = FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)).number();
    rlimit before{};
    CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &before), 0);
    for (rlim_t spare = 0; spare < 2; ++spare) {  // of descriptors
        const rlimit few{static_cast<rlim_t>(free_number) + spare, before.rlim_max};
        CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &few), 0);
        const Result<ProcessHandle> handle = ProcessHandle::open(identity);
        CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &before), 0);
        CHECK(handle.fault().code() == Code::failed);
    }
    CHECK(ProcessHandle::open(identity).ok());
}

TEST(a_received_pidfd_is_adopted) {
    ChildProcess child = waiting_child();
    const ProcessHandle own = open_child(child);
    Result<ProcessHandle> adopted = ProcessHandle::adopt(FileDescriptor(dup(own.file())));
    CHECK(adopted.ok());
    CHECK_EQUAL(adopted.value().pid(), child.pid());
    CHECK_EQUAL(fcntl(adopted.value().file(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    CHECK(!adopted.value().has_exited());
    child.line().tell();
    child.wait_exit();
    CHECK(adopted.value().has_exited());

    const Result<ProcessHandle> late = ProcessHandle::adopt(FileDescriptor(dup(own.file())));
    CHECK(late.ok());
    CHECK_EQUAL(late.value().pid(), 0);
    CHECK(late.value().has_exited());
}

TEST(pidfds_of_one_process_are_told_from_those_of_another) {
    const ChildProcess one = waiting_child();
    const ChildProcess other = waiting_child();
    const ProcessHandle mine = open_child(one);
    CHECK(!mine.is_same(open_child(other)));
    struct statfs system{};
    CHECK_EQUAL(fstatfs(mine.file(), &system), 0);
    // Where pidfds have a file system of their own.
    CHECK_EQUAL(mine.is_same(open_child(one)), system.f_type == 0x50494446);
}

TEST(other_descriptors_are_no_processes) {
    CHECK(ProcessHandle::adopt(FileDescriptor(memfd_create("none", MFD_CLOEXEC))).fault().code() == Code::invalid);
    CHECK(ProcessHandle::adopt(FileDescriptor()).fault().code() == Code::invalid);
}

TEST(waiting_names_all_that_have_exited) {
    ChildProcess first = waiting_child();
    ChildProcess second = waiting_child();
    ChildProcess third = waiting_child();
    const ProcessHandle handles[] = {open_child(first), open_child(second), open_child(third)};
    const ProcessHandle* const all[] = {&handles[0], &handles[1], &handles[2]};
    using Places = std::vector<std::size_t>;

    CHECK(wait_any_exit(all, 0).value().empty());
    second.line().tell();
    CHECK(wait_any_exit(all, -1).value() == Places({1}));
    first.send_signal(SIGKILL);
    first.wait_zombie();
    CHECK(wait_any_exit(all, -1).value() == Places({0, 1}));
    CHECK(wait_any_exit(all, 60'000).value() == Places({0, 1}));
    CHECK(wait_any_exit({}, 0).value().empty());
}

TEST(a_proc_without_the_field_is_a_fault) {
    const test::MadeUpFiles proc("process");
    proc.write("5/stat", "5 (cat) S 1");
    CHECK(identify_process(5, proc.root()).fault().code() == Code::failed);
    CHECK(identify_process(6, proc.root()).fault().code() == Code::unavailable);
}
