#include "shim/file_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>

#include "check.hpp"
#include "child_process.hpp"

using namespace kvo;
using test::ChildProcess;
using test::Line;

namespace {

FileDescriptor new_lock_file() {
    Result<FileDescriptor> file = make_lock_file();
    CHECK(file.ok());
    return std::move(file.value());
}

// Takes the lock on the inherited file, says so, and lives until it is told to end.
ChildProcess owning_child(FileDescriptor& file) {
    return ChildProcess([&file](const Line& line) {
        Result<FileLock> lock = FileLock::take(file);
        line.tell(lock.ok() ? 'y' : 'n');
        line.await();
        return 0;
    });
}

bool can_take(FileDescriptor& file) { return FileLock::take(file).ok(); }

}  // namespace

TEST(one_process_owns_the_lock_until_it_is_killed) {
    FileDescriptor file = new_lock_file();
    ChildProcess owner = owning_child(file);
    CHECK_EQUAL(owner.line().await(), 'y');

    const Result<FileLock> refused = FileLock::take(file);
    CHECK(refused.fault().code() == Code::unavailable);
    CHECK(refused.fault().message().find(std::to_string(owner.pid())) != std::string::npos);
    CHECK(file.is_open());  // not taken, so that it can be tried again
    CHECK_EQUAL(find_lock_owner(file.number()).value(), owner.pid());

    owner.send_signal(SIGKILL);
    owner.wait_zombie();
    CHECK_EQUAL(find_lock_owner(file.number()).value(), 0);
    CHECK(can_take(file));  // before the dead one is reaped
}

TEST(a_stopped_process_still_owns_it) {
    FileDescriptor file = new_lock_file();
    ChildProcess owner = owning_child(file);
    CHECK_EQUAL(owner.line().await(), 'y');
    owner.send_signal(SIGSTOP);
    owner.wait_stopped();
    CHECK(!can_take(file));
}

TEST(duplicates_in_other_processes_change_nothing) {
    FileDescriptor file = new_lock_file();
    const int number = file.number();
    Result<FileLock> lock = FileLock::take(file);
    CHECK(lock.ok());
    CHECK(!file.is_open());

    // A child holds a duplicate, is refused, closes it: the lock stays.
    ChildProcess engine([number](const Line& line) {
        FileDescriptor duplicate(number);
        line.tell(can_take(duplicate) ? 'y' : 'n');
        duplicate = FileDescriptor();
        line.tell();
        line.await();
        return 0;
    });
    CHECK_EQUAL(engine.line().await(), 'n');
    engine.line().await();
    ChildProcess other([number](const Line&) {
        FileDescriptor duplicate(number);
        return can_take(duplicate) ? 1 : 0;
    });
    CHECK_EQUAL(other.wait_exit(), 0);
}

TEST(the_process_that_has_it_is_refused_and_keeps_it) {
    FileDescriptor file = new_lock_file();
    FileDescriptor second(fcntl(file.number(), F_DUPFD_CLOEXEC, 0));
    const int number = file.number();
    {
        Result<FileLock> lock = FileLock::take(file);
        CHECK(lock.ok());
        const Result<FileLock> refused = FileLock::take(second);
        CHECK(refused.fault().code() == Code::unavailable);
        CHECK(refused.fault().message().find("this process already") != std::string::npos);
        CHECK(!second.is_open());  // never closed, which would drop the lock
        ChildProcess other([number](const Line&) {
            FileDescriptor inherited(number);
            return can_take(inherited) ? 1 : 0;
        });
        CHECK_EQUAL(other.wait_exit(), 0);
        FileLock moved = std::move(lock.value());
        CHECK_EQUAL(fcntl(moved.name(), F_GETFL) & O_PATH, O_PATH);
    }
    FileDescriptor next = new_lock_file();
    CHECK(can_take(next));
}

TEST(a_dead_owners_lock_does_not_live_on_in_a_duplicate) {
    FileDescriptor file = new_lock_file();
    ChildProcess owner = owning_child(file);
    CHECK_EQUAL(owner.line().await(), 'y');
    // An engine with the same open file description; so are we.
    ChildProcess engine([](const Line& line) {
        line.await();
        return 0;
    });
    owner.line().tell();
    CHECK_EQUAL(owner.wait_exit(), 0);
    CHECK(can_take(file));
}

TEST(the_forked_child_of_the_owner_neither_owns_nor_drops_it) {
    FileDescriptor file = new_lock_file();
    const int number = file.number();
    Result<FileLock> lock = FileLock::take(file);
    CHECK(lock.ok());
    ChildProcess child([&lock, number](const Line&) {
        const bool is_parents = find_lock_owner(number).value() == getppid();
        const FileLock closed_here = std::move(lock.value());
        return is_parents ? 0 : 1;
    });
    CHECK_EQUAL(child.wait_exit(), 0);
    ChildProcess other([number](const Line&) {
        FileDescriptor duplicate(number);
        return can_take(duplicate) ? 1 : 0;
    });
    CHECK_EQUAL(other.wait_exit(), 0);
}

TEST(the_lock_goes_with_its_object) {
    FileDescriptor file = new_lock_file();
    const FileDescriptor duplicate(fcntl(file.number(), F_DUPFD_CLOEXEC, 0));
    const auto owner_seen_by_child = [&duplicate] {
        ChildProcess child(
            [&duplicate](const Line&) { return find_lock_owner(duplicate.number()).value() == 0 ? 0 : 1; });
        return child.wait_exit() == 1;
    };
    {
        Result<FileLock> lock = FileLock::take(file);
        CHECK(lock.ok());
        const FileLock moved = std::move(lock.value());
        CHECK(owner_seen_by_child());
    }
    CHECK(!owner_seen_by_child());
}

TEST(what_is_sent_names_the_file_and_cannot_lock_it) {
    FileDescriptor file = new_lock_file();
    std::optional<FileLock> lock(std::move(FileLock::take(file).value()));
    FileDescriptor name(fcntl(lock->name(), F_DUPFD_CLOEXEC, 0));
    struct flock shared{};
    shared.l_type = F_RDLCK;
    CHECK_EQUAL(fcntl(name.number(), F_SETLK, &shared), -1);
    CHECK_EQUAL(fcntl(name.number(), F_OFD_SETLK, &shared), -1);
    CHECK_EQUAL(flock(name.number(), LOCK_SH), -1);

    // The owner may receive it, ask about it and close it.
    CHECK_EQUAL(find_lock_owner(name.number()).value(), getpid());
    CHECK(FileLock::adopt(name).fault().code() == Code::unavailable);
    FileDescriptor(fcntl(name.number(), F_DUPFD_CLOEXEC, 0));
    ChildProcess engine([&name](const Line& line) {
        line.tell(FileLock::adopt(name).ok() ? 'y' : 'n');
        line.await();
        line.tell(FileLock::adopt(name).ok() ? 'y' : 'n');
        return 0;
    });
    CHECK_EQUAL(engine.line().await(), 'n');
    lock.reset();
    engine.line().tell();
    CHECK_EQUAL(engine.line().await(), 'y');
}

TEST(what_is_no_lock_file_of_this_user_is_not_adopted) {
    const FileDescriptor unsealed(memfd_create("kvoffload-owner", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(FileLock::adopt(unsealed).fault().code() == Code::invalid);
    const FileDescriptor null(open("/dev/null", O_RDWR | O_CLOEXEC));
    CHECK(!FileLock::adopt(null).ok());
    CHECK(!FileLock::adopt(FileDescriptor()).ok());
    if (geteuid() == 0) {
        const FileDescriptor others = new_lock_file();
        CHECK_EQUAL(fchown(others.number(), 61001, 61001), 0);
        const Status refused = FileLock::adopt(others).fault();
        CHECK(refused.code() == Code::invalid && refused.message().find("61001") != std::string::npos);
    }
}

TEST(files_that_cannot_be_locked_are_faults) {
    FileDescriptor none;
    CHECK(FileLock::take(none).fault().code() == Code::failed);
    CHECK(!find_lock_owner(-1).ok());
    FileDescriptor file = new_lock_file();
    CHECK_EQUAL(fcntl(file.number(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    CHECK_EQUAL(ftruncate(file.number(), 4096), -1);
    const std::string path = "/proc/self/fd/" + std::to_string(file.number());
    FileDescriptor reader(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    CHECK(FileLock::take(reader).fault().code() == Code::failed);
}
