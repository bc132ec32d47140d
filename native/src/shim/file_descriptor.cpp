#include "shim/file_descriptor.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <optional>

namespace kvo {

namespace {

// The number of the file system that a descriptor's file is in, which the kernel knows by itself.
std::optional<dev_t> device_of(int file) noexcept {
    struct statx facts{};
    if (statx(file, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &facts) != 0) {
        return std::nullopt;
    }
    return makedev(facts.stx_dev_major, facts.stx_dev_minor);
}

}  // namespace

bool is_memory_file(int file) noexcept {
    // Only files in memory have seals, but a descriptor that merely names a file (O_PATH) does not tell of them.
    if (fcntl(file, F_GET_SEALS) >= 0) {
        return true;
    }
    const FileDescriptor own(memfd_create("kvoffload-probe", MFD_CLOEXEC));
    const std::optional<dev_t> device = own.is_open() ? device_of(own.number()) : std::nullopt;
    return device && device_of(file) == device;
}

}  // namespace kvo
