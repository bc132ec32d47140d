#include "shim/memory_headroom.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

namespace kvo {
namespace {

namespace fs = std::filesystem;

struct Bound {
    std::uint64_t limit = UINT64_MAX;
    std::string name;
};

// The names of one version's files.
struct CgroupFiles {
    std::array<const char*, 2> limits;
    const char* used;
    const char* inactive_cache;
    const char* active_cache;
};

constexpr CgroupFiles kVersion2{{"memory.max", "memory.high"}, "memory.current", "inactive_file", "active_file"};
constexpr CgroupFiles kVersion1{
    {"memory.limit_in_bytes", nullptr}, "memory.usage_in_bytes", "total_inactive_file", "total_active_file"};

// Version 1 writes "no limit" as a number just below 2^63.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 62;

// "max", an absent file and a broken one are all no number.
std::optional<std::uint64_t> read_number(const fs::path& file) {
    std::uint64_t number = 0;
    if (!(std::ifstream(file) >> number)) {
        return std::nullopt;
    }
    return number;
}

// A line "key: number" or "key number".
std::uint64_t read_value(const fs::path& file, std::string_view key, std::uint64_t otherwise) {
    std::ifstream stream(file);
    std::string line;
    while (std::getline(stream, line)) {
        std::string_view text = line;
        if (!text.starts_with(key)) {
            continue;
        }
        text.remove_prefix(key.size());
        if (text.empty() || (text.front() != ':' && text.front() != ' ')) {
            continue;
        }
        text.remove_prefix(std::min(text.find_first_not_of(": \t"), text.size()));
        std::uint64_t number = 0;
        const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
        return fault == std::errc{} ? number : otherwise;
    }
    return otherwise;
}

void lower(MemoryHeadroom& headroom, std::uint64_t bytes, std::string limited_by) {
    if (bytes < headroom.bytes) {
        headroom.bytes = bytes;
        headroom.limited_by = std::move(limited_by);
    }
}

void read_machine(const fs::path& proc, MemoryHeadroom& headroom) {
    const std::uint64_t available = read_value(proc / "meminfo", "MemAvailable", UINT64_MAX / 1024);
    if (available < UINT64_MAX / 1024) {
        const std::uint64_t bytes = available * 1024;
        lower(headroom, bytes, "the machine has " + describe_size(bytes) + " available (MemAvailable)");
    }
    const std::uint64_t total = read_value(proc / "meminfo", "MemTotal", UINT64_MAX / 1024);
    headroom.total_bytes = total < UINT64_MAX / 1024 ? total * 1024 : UINT64_MAX;
}

void read_cgroup(const fs::path& folder, const CgroupFiles& files, MemoryHeadroom& headroom) {
    Bound bound;
    for (const char* const name : files.limits) {
        const std::optional<std::uint64_t> limit = name != nullptr ? read_number(folder / name) : std::nullopt;
        if (limit && *limit < kNoLimit && *limit < bound.limit) {
            bound = {*limit, name};
        }
    }
    const std::optional<std::uint64_t> used = read_number(folder / files.used);
    if (bound.name.empty() || !used) {
        return;
    }
    headroom.total_bytes = std::min(headroom.total_bytes, bound.limit);
    // Like the kernel's MemAvailable, counts half of the active cache as free: about that much can be dropped without
    // harm.
    const std::uint64_t droppable = read_value(folder / "memory.stat", files.inactive_cache, 0) +
                                    read_value(folder / "memory.stat", files.active_cache, 0) / 2;
    const std::uint64_t kept = *used - std::min(*used, droppable);
    lower(headroom, bound.limit - std::min(bound.limit, kept),
          "the cgroup " + folder.string() + " is limited to " + describe_size(bound.limit) + " (" + bound.name +
              "), of which " + describe_size(kept) + " are in use");
}

bool lists(std::string_view words, std::string_view wanted) {
    while (!words.empty()) {
        const std::size_t comma = std::min(words.find(','), words.size());
        if (words.substr(0, comma) == wanted) {
            return true;
        }
        words.remove_prefix(std::min(comma + 1, words.size()));
    }
    return false;
}

struct Mount {
    fs::path root;   // the part of the hierarchy that is mounted
    fs::path point;  // where
};

// A line of mountinfo: id, parent, device, root, mount point, options, optional fields, "-", type, source, options.
std::optional<Mount> parse_mount(const std::string& line, bool is_version2) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) {
        return std::nullopt;
    }
    std::istringstream front(line.substr(0, dash));
    std::istringstream back(line.substr(dash + 3));
    std::string skipped, root, point, type, source, options;
    front >> skipped >> skipped >> skipped >> root >> point;
    back >> type >> source >> options;
    const bool is_wanted = is_version2 ? type == "cgroup2" : type == "cgroup" && lists(options, "memory");
    return is_wanted && !point.empty() ? std::optional<Mount>({root, point}) : std::nullopt;
}

std::optional<Mount> find_mount(const fs::path& proc, bool is_version2) {
    std::ifstream stream(proc / "self" / "mountinfo");
    std::string line;
    while (std::getline(stream, line)) {
        if (std::optional<Mount> mount = parse_mount(line, is_version2)) {
            return mount;
        }
    }
    return std::nullopt;
}

// A line of self/cgroup: number, controllers, path. Version 2 is number 0 with no controllers.
std::optional<std::string> find_cgroup(const fs::path& proc, bool is_version2) {
    std::ifstream stream(proc / "self" / "cgroup");
    std::string line;
    while (std::getline(stream, line)) {
        const std::size_t first = line.find(':');
        const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) {
            continue;
        }
        const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
        if (is_version2 ? line.starts_with("0::") : lists(controllers, "memory")) {
            return line.substr(second + 1);
        }
    }
    return std::nullopt;
}

void read_hierarchy(const fs::path& proc, bool is_version2, MemoryHeadroom& headroom) {
    const std::optional<Mount> mount = find_mount(proc, is_version2);
    const std::optional<std::string> cgroup = find_cgroup(proc, is_version2);
    if (!mount || !cgroup) {
        return;
    }
    // In a container the mount may begin at our own cgroup, which self/cgroup names by a path from outside.
    fs::path below = fs::path(*cgroup).lexically_relative(mount->root);
    if (below.empty() || *below.begin() == "..") {
        below = ".";
    }
    const CgroupFiles& files = is_version2 ? kVersion2 : kVersion1;
    for (; !below.empty() && below != "."; below = below.parent_path()) {
        read_cgroup(mount->point / below, files, headroom);
    }
    read_cgroup(mount->point, files, headroom);
}

}  // namespace

MemoryHeadroom read_memory_headroom(const fs::path& proc) {
    MemoryHeadroom headroom;
    read_machine(proc, headroom);
    read_hierarchy(proc, true, headroom);
    read_hierarchy(proc, false, headroom);
    return headroom;
}

Status check_memory_headroom(std::uint64_t needed, const fs::path& proc) {
    const MemoryHeadroom headroom = read_memory_headroom(proc);
    if (needed <= headroom.bytes) {
        return {};
    }
    return {Code::unavailable, describe_size(needed) + " of memory are not there: " + describe_size(headroom.bytes) +
                                   " are left; " + headroom.limited_by};
}

}  // namespace kvo
