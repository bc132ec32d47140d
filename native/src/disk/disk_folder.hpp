// One folder of a device: whose it is, who may use it, and the segment files in it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "shim/file_descriptor.hpp"
#include "shim/file_lock.hpp"

namespace kvo {

struct FolderTerms {
    std::string path;  // must be there: a missing mount takes it away, and no other is made in its place
    std::uint64_t segment_bytes = 0;
    bool may_create = true;   // an empty folder becomes a store
    std::uint64_t store = 0;  // the only store that is meant; 0: whichever is there
};

// A folder of ours that no other process uses. For one thread at a time; every call may wait for the file system.
class DiskFolder {
public:
    // Code::unavailable or failed, in one line with the folder's name: it is not there, not ours alone, in use, or has
    // segments of another size.
    static Result<DiskFolder> open(const FolderTerms& terms);

    std::uint64_t store() const noexcept { return store_; }
    bool is_new() const noexcept { return is_new_; }

    // Whether the path still leads to this folder, with its identity in it.
    Status check() const;

    // The numbers of the segment files, ascending. Files with other names are not ours and stay.
    Result<std::vector<std::uint32_t>> list_segments() const;

    // Code::unavailable: the file is not a whole segment of ours, for instance because it is truncated or another
    // user's.
    Result<FileDescriptor> open_segment(std::uint32_t number) const;

    // Creates the file and allocates all its bytes. Code::unavailable: the file system is full (ENOSPC, EDQUOT), and no
    // file is left.
    Result<FileDescriptor> create_segment(std::uint32_t number) const;

    Status remove_segment(std::uint32_t number) const;

    // Writes a block and makes it durable, to see whether that works.
    Status try_writing() const;

private:
    DiskFolder(std::string path, FileDescriptor folder, FileLock lock)
        : path_(std::move(path)), folder_(std::move(folder)), lock_(std::move(lock)) {}

    Status read_identity(const FolderTerms& terms);
    Status write_identity(const FolderTerms& terms);
    Status no_segment(const std::string& what, int error) const;
    std::string where(const std::string& what) const;

    std::string path_;
    FileDescriptor folder_;
    FileLock lock_;
    std::uint64_t segment_bytes_ = 0;
    std::uint64_t store_ = 0;
    ino_t identity_ = 0;
    bool is_new_ = false;
};

// The name of the file of this segment in its folder.
std::string segment_file_name(std::uint32_t number);

}  // namespace kvo
