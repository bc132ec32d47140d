#include "shim/file_lock.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/status.hpp"

namespace kvo {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

struct flock first_byte() {
    struct flock record{};
    record.l_type = F_WRLCK;
    record.l_whence = SEEK_SET;
    record.l_start = 0;
    record.l_len = 1;
    return record;
}

// The kernel tells processes apart, not the places of one process; and closing a second descriptor would drop the lock.
class OwnLocks {
public:
    using Name = std::pair<dev_t, ino_t>;

    bool add(const Name& name) {
        const std::lock_guard lock(mutex_);
        forget_parent();
        return names_.insert(name).second;
    }
    bool has(const Name& name) {
        const std::lock_guard lock(mutex_);
        forget_parent();
        return names_.contains(name);
    }
    void remove(const Name& name) {
        const std::lock_guard lock(mutex_);
        forget_parent();
        names_.erase(name);
    }

private:
    // A forked child has none of the locks of its parent.
    void forget_parent() {
        if (std::exchange(process_, getpid()) != getpid()) {
            names_.clear();
        }
    }

    std::mutex mutex_;
    std::set<Name> names_;
    pid_t process_ = getpid();
};

OwnLocks& own_locks() {
    static OwnLocks& locks = *new OwnLocks;  // never destroyed: a lock may be dropped at the very end
    return locks;
}

std::optional<OwnLocks::Name> name_of(int file) {
    struct stat facts;
    return fstat(file, &facts) == 0 ? std::optional(OwnLocks::Name{facts.st_dev, facts.st_ino}) : std::nullopt;
}

Result<FileDescriptor> open_again(int file, int flags) {
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    FileDescriptor again(open(path.c_str(), flags | O_CLOEXEC));
    if (!again.is_open()) {
        return system_fault("opening a lock file again by " + path, errno);
    }
    return again;
}

}  // namespace

Result<FileLock> FileLock::take(FileDescriptor& file) {
    const std::optional<OwnLocks::Name> name = name_of(file.number());
    if (!name) {
        return system_fault("fstat of a lock file", errno);
    }
    if (!own_locks().add(*name)) {
        (void)file.release();  // left open: to close it would drop the lock that is held
        return Status(Code::unavailable, "these segments are owned by this process already");
    }
    auto sendable = open_again(file.number(), O_PATH);
    if (!sendable.ok()) {
        own_locks().remove(*name);
        return sendable.fault();
    }
    struct flock record = first_byte();
    if (fcntl(file.number(), F_SETLK, &record) == 0) {
        return FileLock(std::move(file), std::move(sendable.value()));
    }
    const int error = errno;
    own_locks().remove(*name);
    if (error == EACCES || error == EAGAIN) {
        const Result<pid_t> owner = find_lock_owner(file.number());
        const std::string number = owner.ok() && owner.value() > 0 ? " " + std::to_string(owner.value()) : "";
        return Status(Code::unavailable, "these segments are owned by another process" + number);
    }
    return system_fault("fcntl(F_SETLK)", error);
}

Result<FileLock> FileLock::adopt(const FileDescriptor& file) {
    struct stat facts;
    if (fstat(file.number(), &facts) != 0) {
        return system_fault("fstat of a lock file", errno);
    }
    if (facts.st_uid != geteuid()) {
        return Status(Code::invalid, "the lock file is of user " + std::to_string(facts.st_uid) + ", not of user " +
                                         std::to_string(geteuid()));
    }
    // Checked before opening the file: closing it again would drop the lock that this process holds.
    if (own_locks().has({facts.st_dev, facts.st_ino})) {
        return Status(Code::unavailable, "these segments are owned by this process already");
    }
    auto writable = open_again(file.number(), O_RDWR);
    if (!writable.ok()) {
        return writable.fault();
    }
    const int seals = fcntl(writable.value().number(), F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals) {
        return Status(Code::invalid, "the file received as a lock is not a memfd that is sealed as one");
    }
    return take(writable.value());
}

FileLock& FileLock::operator=(FileLock&& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(name_, other.name_);
    return *this;
}

FileLock::~FileLock() {
    if (const auto name = file_.is_open() ? name_of(file_.number()) : std::nullopt) {
        file_ = FileDescriptor();
        own_locks().remove(*name);
    }
}

Result<pid_t> find_lock_owner(int file) {
    const auto name = name_of(file);
    if (name && own_locks().has(*name)) {
        return getpid();
    }
    const auto readable = open_again(file, O_RDONLY);
    if (!readable.ok()) {
        return readable.fault();
    }
    struct flock record = first_byte();
    if (fcntl(readable.value().number(), F_GETLK, &record) != 0) {
        return system_fault("fcntl(F_GETLK)", errno);
    }
    if (record.l_type == F_UNLCK) {
        return pid_t{0};
    }
    return record.l_pid > 0 ? record.l_pid : pid_t{-1};
}

Result<std::uint64_t> mark_file(int file) {
    const auto name = name_of(file);
    if (!name) {
        return system_fault("fstat", errno);
    }
    const auto& [device, inode] = *name;
    return (std::uint64_t{device} + 1) * 0x9e3779b97f4a7c15 ^ std::uint64_t{inode};
}

Result<FileDescriptor> make_lock_file() {
    FileDescriptor file(memfd_create("kvoffload-owner", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!file.is_open()) {
        return system_fault("memfd_create", errno);
    }
    if (fchmod(file.number(), S_IRUSR | S_IWUSR) != 0) {
        return system_fault("fchmod of a lock file", errno);
    }
    if (fcntl(file.number(), F_ADD_SEALS, kSeals) != 0) {
        return system_fault("sealing a lock file", errno);
    }
    return file;
}

}  // namespace kvo
