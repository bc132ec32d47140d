#include "disk/disk_folder.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "base/status.hpp"
#include "disk/record_format.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {
namespace {

constexpr const char* kIdentityName = "identity";
constexpr const char* kNewIdentityName = "identity.new";
constexpr const char* kLockName = "lock";
constexpr const char* kProbeName = "probe";
constexpr std::size_t kMaxIdentityBytes = 256;

std::string identity_text(std::uint64_t store, std::uint64_t segment_bytes) {
    std::array<char, kMaxIdentityBytes> text{};
    std::snprintf(text.data(), text.size(), "kvoffload disk %u\nstore %016" PRIx64 "\nsegment_bytes %" PRIu64 "\n",
                  unsigned{kDiskVersion}, store, segment_bytes);
    return text.data();
}

FileDescriptor open_in(const FileDescriptor& folder, const char* name, int flags) {
    return FileDescriptor(openat(folder.number(), name, flags | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR));
}

// Some file systems have no O_DIRECT: their pages are written as well, by way of the kernel's cache.
FileDescriptor open_direct(const FileDescriptor& folder, const char* name, int flags) {
    FileDescriptor file = open_in(folder, name, flags | O_DIRECT);
    if (!file.is_open() && errno == EINVAL) {
        file = open_in(folder, name, flags);
    }
    return file;
}

Status check_owner(const std::string& where, const struct stat& folder) {
    if (folder.st_uid != geteuid()) {
        return {Code::unavailable, where + "it belongs to user " + std::to_string(folder.st_uid) + ", not to " +
                                       std::to_string(geteuid())};
    }
    if ((folder.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
        return {Code::unavailable, where + "others may enter it; its mode must be 0700"};
    }
    return {};
}

Status write_all(int file, const std::string& text) {
    const ssize_t written = write(file, text.data(), text.size());
    if (written != static_cast<ssize_t>(text.size())) {
        return system_fault("write", written < 0 ? errno : ENOSPC);
    }
    return fsync(file) == 0 ? Status() : system_fault("fsync", errno);
}

}  // namespace

std::string segment_file_name(std::uint32_t number) {
    std::array<char, 32> name{};
    std::snprintf(name.data(), name.size(), "segment-%06" PRIu32, number);
    return name.data();
}

std::string DiskFolder::where(const std::string& what) const { return "disk folder " + path_ + ": " + what; }

Result<DiskFolder> DiskFolder::open(const FolderTerms& terms) {
    const std::string where = "disk folder " + terms.path + ": ";
    FileDescriptor folder(::open(terms.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder.is_open()) {
        return Status(Code::unavailable, where + system_fault("open", errno).message());
    }
    struct stat facts;
    if (fstat(folder.number(), &facts) != 0) {
        return system_fault(where + "fstat", errno);
    }
    if (Status status = check_owner(where, facts); !status.ok()) {
        return status;
    }
    FileDescriptor lock_file = open_in(folder, kLockName, O_RDWR | O_CREAT);
    if (!lock_file.is_open()) {
        return Status(Code::unavailable, where + system_fault("opening its lock", errno).message());
    }
    Result<FileLock> lock = FileLock::take(lock_file);
    if (!lock.ok()) {
        return Status(Code::unavailable, where + "another server uses it: " + lock.fault().message());
    }
    DiskFolder made(terms.path, std::move(folder), std::move(lock.value()));
    if (Status status = made.read_identity(terms); !status.ok()) {
        return status;
    }
    return made;
}

Status DiskFolder::read_identity(const FolderTerms& terms) {
    segment_bytes_ = terms.segment_bytes;
    const FileDescriptor file = open_in(folder_, kIdentityName, O_RDONLY);
    if (!file.is_open()) {
        if (errno == ENOENT && terms.may_create) {
            return write_identity(terms);
        }
        return {Code::unavailable, where(system_fault("opening its identity", errno).message())};
    }
    std::array<char, kMaxIdentityBytes + 1> text{};
    const ssize_t length = read(file.number(), text.data(), kMaxIdentityBytes);
    unsigned version = 0;
    std::uint64_t segment_bytes = 0;
    const int fields = std::sscanf(text.data(), "kvoffload disk %u\nstore %" SCNx64 "\nsegment_bytes %" SCNu64,
                                   &version, &store_, &segment_bytes);
    if (length <= 0 || fields != 3 || store_ == 0 || identity_text(store_, segment_bytes) != text.data()) {
        return {Code::unavailable, where("its identity file is damaged or of another version; empty the folder")};
    }
    if (segment_bytes != terms.segment_bytes) {
        return {Code::invalid, where("its segments have " + std::to_string(segment_bytes) + " bytes, not " +
                                     std::to_string(terms.segment_bytes) + "; empty the folder to change that")};
    }
    if (terms.store != 0 && store_ != terms.store) {
        return {Code::unavailable, where("another store is there now")};
    }
    struct stat facts;
    identity_ = fstat(file.number(), &facts) == 0 ? facts.st_ino : 0;
    return {};
}

Status DiskFolder::write_identity(const FolderTerms& terms) {
    const auto segments = list_segments();
    if (!segments.ok() || !segments.value().empty()) {
        return {Code::unavailable, where("it has segments and no identity file; empty the folder")};
    }
    while (store_ == 0) {
        if (getrandom(&store_, sizeof store_, 0) != sizeof store_) {
            return system_fault("getrandom", errno);
        }
    }
    const FileDescriptor file = open_in(folder_, kNewIdentityName, O_WRONLY | O_CREAT | O_TRUNC);
    if (!file.is_open()) {
        return {Code::unavailable, where(system_fault("writing its identity", errno).message())};
    }
    if (Status status = write_all(file.number(), identity_text(store_, terms.segment_bytes)); !status.ok()) {
        return {Code::unavailable, where("its identity: " + status.message())};
    }
    struct stat facts;
    if (renameat(folder_.number(), kNewIdentityName, folder_.number(), kIdentityName) != 0 ||
        fsync(folder_.number()) != 0 || fstat(file.number(), &facts) != 0) {
        return {Code::unavailable, where(system_fault("writing its identity", errno).message())};
    }
    identity_ = facts.st_ino;
    is_new_ = true;
    return {};
}

Status DiskFolder::check() const {
    struct stat by_path, opened, identity;
    if (stat(path_.c_str(), &by_path) != 0) {
        return {Code::unavailable, where(system_fault("it has gone", errno).message())};
    }
    if (fstat(folder_.number(), &opened) != 0 || by_path.st_dev != opened.st_dev || by_path.st_ino != opened.st_ino) {
        return {Code::unavailable, where("another folder lies at its path: its mount has gone")};
    }
    if (Status status = check_owner(where(""), opened); !status.ok()) {
        return status;
    }
    if (fstatat(folder_.number(), kIdentityName, &identity, AT_SYMLINK_NOFOLLOW) != 0 || identity.st_ino != identity_) {
        return {Code::unavailable, where("its identity file has gone")};
    }
    return {};
}

Result<std::vector<std::uint32_t>> DiskFolder::list_segments() const {
    // A descriptor of its own: reading a folder moves the place that its descriptor stands at.
    FileDescriptor again = open_in(folder_, ".", O_RDONLY | O_DIRECTORY);
    const std::unique_ptr<DIR, int (*)(DIR*)> entries(fdopendir(again.number()), closedir);
    if (!entries) {
        return system_fault(where("reading it"), errno);
    }
    static_cast<void>(again.release());
    std::vector<std::uint32_t> numbers;
    while (const dirent* const entry = readdir(entries.get())) {
        std::uint32_t number = 0;
        if (std::sscanf(entry->d_name, "segment-%" SCNu32, &number) == 1 &&
            segment_file_name(number) == entry->d_name) {
            numbers.push_back(number);
        }
    }
    std::ranges::sort(numbers);
    return numbers;
}

Result<FileDescriptor> DiskFolder::open_segment(std::uint32_t number) const {
    const std::string name = segment_file_name(number);
    FileDescriptor file = open_direct(folder_, name.c_str(), O_RDWR);
    if (!file.is_open() && errno == EROFS) {
        file = open_direct(folder_, name.c_str(), O_RDONLY);
    }
    struct stat facts;
    if (!file.is_open() || fstat(file.number(), &facts) != 0) {
        return Status(Code::failed, where(system_fault(name, errno).message()));
    }
    const bool is_ours = S_ISREG(facts.st_mode) && facts.st_uid == geteuid() && facts.st_nlink == 1 &&
                         (facts.st_mode & (S_IRWXG | S_IRWXO)) == 0;
    if (!is_ours || static_cast<std::uint64_t>(facts.st_size) != segment_bytes_) {
        return Status(Code::unavailable, where(name + " is not a whole file of ours"));
    }
    return file;
}

Status DiskFolder::no_segment(const std::string& what, int error) const {
    const bool is_full = error == ENOSPC || error == EDQUOT;
    return {is_full ? Code::unavailable : Code::failed, where(system_fault(what, error).message())};
}

Result<FileDescriptor> DiskFolder::create_segment(std::uint32_t number) const {
    const std::string name = segment_file_name(number);
    struct statvfs room;
    // An attempt that cannot succeed would take all that is left for a moment, while other programs may need it.
    if (fstatvfs(folder_.number(), &room) == 0 && room.f_blocks > 0 && room.f_bfree * room.f_frsize < segment_bytes_) {
        return no_segment("setting a segment aside", ENOSPC);
    }
    FileDescriptor file = open_direct(folder_, name.c_str(), O_RDWR | O_CREAT | O_EXCL);
    if (!file.is_open()) {
        return no_segment(name, errno);
    }
    int error = 0;
    if (fallocate(file.number(), 0, 0, static_cast<off_t>(segment_bytes_)) != 0) {
        // A file system that cannot set room aside says that it is full when it is.
        const bool cannot = errno == EOPNOTSUPP;
        error = cannot && ftruncate(file.number(), static_cast<off_t>(segment_bytes_)) == 0 ? 0 : errno;
    }
    if (error == 0 && (fsync(file.number()) != 0 || fsync(folder_.number()) != 0)) {
        error = errno;
    }
    if (error != 0) {
        unlinkat(folder_.number(), name.c_str(), 0);
        return no_segment("setting a segment aside", error);
    }
    return file;
}

Status DiskFolder::remove_segment(std::uint32_t number) const {
    const std::string name = segment_file_name(number);
    if (unlinkat(folder_.number(), name.c_str(), 0) != 0 && errno != ENOENT) {
        return {Code::failed, where(system_fault("removing " + name, errno).message())};
    }
    return {};
}

Status DiskFolder::try_writing() const {
    if (Status status = check(); !status.ok()) {
        return status;
    }
    Result<AlignedMemory> block = AlignedMemory::create(kIoAlignment);
    const FileDescriptor file = open_direct(folder_, kProbeName, O_RDWR | O_CREAT);
    if (!block.ok() || !file.is_open()) {
        return {Code::unavailable, where(system_fault("opening its probe", errno).message())};
    }
    const ssize_t written = pwrite(file.number(), block.value().start(), kIoAlignment, 0);
    if (written != static_cast<ssize_t>(kIoAlignment) || fdatasync(file.number()) != 0) {
        return {Code::unavailable, where(system_fault("writing its probe", written < 0 ? errno : ENOSPC).message())};
    }
    return {};
}

}  // namespace kvo
