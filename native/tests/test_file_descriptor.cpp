#include "shim/file_descriptor.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <string>

#include "check.hpp"

using namespace kvo;

TEST(a_file_in_memory_is_known_by_any_descriptor_of_it) {
    const FileDescriptor file(memfd_create("test", MFD_CLOEXEC));
    CHECK(is_memory_file(file.number()));
    const FileDescriptor name(open(("/proc/self/fd/" + std::to_string(file.number())).c_str(), O_PATH | O_CLOEXEC));
    CHECK(is_memory_file(name.number()));
}

TEST(other_descriptors_are_not_of_files_in_memory) {
    for (const char* path : {"/proc/self/exe", "/dev/null", "/tmp", "/proc/self/status"}) {
        for (const int access : {O_RDONLY, O_PATH}) {
            CHECK(!is_memory_file(FileDescriptor(open(path, access | O_CLOEXEC)).number()));
        }
    }
    CHECK(!is_memory_file(FileDescriptor(socket(AF_UNIX, SOCK_STREAM, 0)).number()));
    CHECK(!is_memory_file(-1));
}
