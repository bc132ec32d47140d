// The sign that one living process owns a set of segments: an exclusive lock on a memfd made for nothing else.
#pragma once

#include <sys/types.h>

#include <cstdint>

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
// The hazard of record locks: **the first open descriptor of the file that this process closes drops the lock**,
// whichever it is. So the file is used for this lock alone and this class owns the process's only such descriptor.
// Others are given one that names the file and cannot be used to lock it, to read it or to write it (O_PATH): who has
// it can neither hold the lock nor wait for it, unless the kernel lets him open the file, which is its user's; and it
// may be received, duplicated and closed here as well.
class FileLock {
public:
    // Does not block. Takes the descriptor, which must be open for writing, only if the lock was got.
    // Code::unavailable: another process has it; or this one already, then the descriptor stays open for good. Needs
    // /proc.
    static Result<FileLock> take(FileDescriptor& file);

    // The lock of a former process of this user, by a descriptor of its file of whatever kind. Code::unavailable: that
    // process has it still, or this one. Code::invalid: it is another user's file, or not one for this. Needs /proc.
    static Result<FileLock> adopt(const FileDescriptor& file);

    FileLock(FileLock&&) noexcept = default;
    FileLock& operator=(FileLock&& other) noexcept;
    ~FileLock();  // drops it

    int name() const noexcept { return name_.number(); }  // the descriptor that names the file, to be sent

private:
    FileLock(FileDescriptor file, FileDescriptor name) noexcept : file_(std::move(file)), name_(std::move(name)) {}

    FileDescriptor file_;
    FileDescriptor name_;
};

// The process that has the lock on a file: 0 if there is none, -1 if it is in another PID namespace. Needs /proc.
Result<pid_t> find_lock_owner(int file);

// The same for all descriptors of a file, and of no other file.
Result<std::uint64_t> mark_file(int file);

// An empty memfd, sealed as segments are, for a lock.
Result<FileDescriptor> make_lock_file();

}  // namespace kvo
