// The sign that one living process owns a set of segments: an exclusive lock on a memfd made for nothing else.
#pragma once

#include <sys/types.h>

#include "base/status.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// A record lock (fcntl F_SETLK) on the file's first byte. The kernel drops it when the owning process ends, by whatever
// means, and not before: a process that is stopped or hangs is still the owner. Other processes may hold duplicates of
// the descriptor, keep them beyond the owner's end, and close them; that changes nothing. Children made by fork() hold
// no lock and drop none.
//
// Locks of open file descriptions (F_OFD_SETLK) would not do: a descriptor sent over a socket is the same description,
// so a dead owner's lock would live on in every engine that was handed the file.
//
// The hazard of record locks: **the first descriptor of the file that this process closes drops the lock**, whichever
// it is. So the file is used for this lock alone and this class owns the process's only descriptor of it: it is not a
// segment, nobody opens it again by /proc, duplicates it here or receives it twice. Sending it over a socket is sound.
class FileLock {
public:
    // Does not block. Takes the descriptor, which must be open for writing, only if the lock was got.
    // Code::unavailable: another process has it; or this one already, then the descriptor stays open for good.
    static Result<FileLock> take(FileDescriptor& file);

    FileLock(FileLock&&) noexcept = default;
    FileLock& operator=(FileLock&& other) noexcept;
    ~FileLock();  // drops it

    int file() const noexcept { return file_.number(); }  // to be sent, not to be closed

private:
    explicit FileLock(FileDescriptor file) noexcept : file_(std::move(file)) {}

    FileDescriptor file_;
};

// The process that has the lock on a file: 0 if there is none (or it is this one), -1 if it is in another PID
// namespace.
Result<pid_t> find_lock_owner(int file);

// An empty memfd, sealed as segments are, for a lock.
Result<FileDescriptor> make_lock_file();

}  // namespace kvo
