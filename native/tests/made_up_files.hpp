// A folder of files of our own, such as a made-up /proc, gone with the test.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace kvo::test {

class MadeUpFiles {
public:
    explicit MadeUpFiles(const std::string& name)
        : root_(std::filesystem::temp_directory_path() / ("kvoffload_" + name + "_" + std::to_string(getpid()))) {
        std::filesystem::create_directories(root_);
    }
    ~MadeUpFiles() { std::filesystem::remove_all(root_); }
    MadeUpFiles(const MadeUpFiles&) = delete;
    MadeUpFiles& operator=(const MadeUpFiles&) = delete;

    void write(const std::string& path, const std::string& text) const {
        std::filesystem::create_directories((root_ / path).parent_path());
        std::ofstream(root_ / path) << text << "\n";
    }
    // Writes a made-up /proc/meminfo with this much available memory.
    void write_available(std::uint64_t bytes) const {
        write("meminfo", "MemTotal: 99999999 kB\nMemAvailable:   " + std::to_string(bytes / 1024) + " kB");
    }
    const std::filesystem::path& root() const { return root_; }

private:
    std::filesystem::path root_;
};

}  // namespace kvo::test
