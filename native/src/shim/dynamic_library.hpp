// A shared library that may or may not be on this machine.
#pragma once

#include <string>

#include "base/status.hpp"

namespace kvo {

// Once opened it stays loaded until the process ends: drivers keep threads and handlers that must not lose their code.
class DynamicLibrary {
public:
    // May block on the disk. Code::unavailable with the loader's own words.
    static Result<DynamicLibrary> open(const std::string& name);

    // Null if the library has no such symbol.
    void* find(const char* symbol) const noexcept;

    // The file that has this function's code, as the loader names it; empty if it knows none.
    static std::string file_of(const void* function);

private:
    explicit DynamicLibrary(void* handle) noexcept : handle_(handle) {}

    void* handle_;
};

}  // namespace kvo
