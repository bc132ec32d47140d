#include "shim/host_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string_view>
#include <system_error>

namespace kvo {
namespace {

namespace fs = std::filesystem;

std::uint64_t read_count(const fs::path& file) {
    std::uint64_t number = 0;
    std::ifstream(file) >> number;
    return number;
}

// The kernel lists all choices and puts the one in force in brackets.
std::string read_choice(const fs::path& file) {
    std::ifstream stream(file);
    std::string word;
    while (stream >> word) {
        if (word.size() > 2 && word.front() == '[' && word.back() == ']') {
            return word.substr(1, word.size() - 2);
        }
    }
    return {};
}

// The number in a name such as hugepages-2048kB or node1; false if the name is of another kind.
bool parse_numbered(std::string_view name, std::string_view prefix, std::string_view suffix, std::uint64_t& number) {
    if (!name.starts_with(prefix) || !name.ends_with(suffix) || name.size() <= prefix.size() + suffix.size()) {
        return false;
    }
    name = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
    const auto [end, fault] = std::from_chars(name.data(), name.data() + name.size(), number);
    return fault == std::errc{} && end == name.data() + name.size();
}

template <typename Visit>
void each_numbered(const fs::path& folder, std::string_view prefix, std::string_view suffix, Visit visit) {
    std::error_code fault;
    for (fs::directory_iterator entry(folder, fault), end; !fault && entry != end; entry.increment(fault)) {
        std::uint64_t number = 0;
        if (parse_numbered(entry->path().filename().native(), prefix, suffix, number)) {
            visit(number, entry->path());
        }
    }
}

}  // namespace

HostMemory read_host_memory(const fs::path& sysfs) {
    HostMemory memory;
    memory.page_bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));

    const fs::path settings = sysfs / "kernel" / "mm";
    each_numbered(settings / "hugepages", "hugepages-", "kB", [&](std::uint64_t kibibytes, const fs::path& pool) {
        memory.huge_pages.push_back(
            {kibibytes * 1024, read_count(pool / "nr_hugepages"), read_count(pool / "free_hugepages")});
    });
    std::ranges::sort(memory.huge_pages, {}, &HugePagePool::page_bytes);
    memory.transparent_huge_pages = read_choice(settings / "transparent_hugepage" / "enabled");
    memory.transparent_huge_pages_in_shmem = read_choice(settings / "transparent_hugepage" / "shmem_enabled");

    std::size_t nodes = 0;
    each_numbered(sysfs / "devices" / "system" / "node", "node", "", [&](std::uint64_t, const fs::path&) { ++nodes; });
    memory.numa_nodes = std::max<std::size_t>(nodes, 1);
    return memory;
}

}  // namespace kvo
