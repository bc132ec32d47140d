// A file descriptor with an owner.
#pragma once

#include <unistd.h>

#include <utility>

namespace kvo {

class FileDescriptor {
public:
    FileDescriptor() noexcept = default;
    explicit FileDescriptor(int number) noexcept : number_(number) {}
    FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        FileDescriptor closed_after(std::exchange(number_, other.release()));
        return *this;
    }
    ~FileDescriptor() {
        if (number_ >= 0) {
            close(number_);
        }
    }

    int number() const noexcept { return number_; }  // -1: none
    bool is_open() const noexcept { return number_ >= 0; }
    int release() noexcept { return std::exchange(number_, -1); }

private:
    int number_ = -1;
};

// Whether a descriptor that another process sent is of a file in memory (a memfd). Only the kernel is asked, never the
// file's own file system: that may be another user's, which never answers. Any other call, even fstat or close, may
// wait for it.
bool is_memory_file(int file) noexcept;

}  // namespace kvo
