// The functions of the driver's interface, by name and by the version of CUDA that brought each signature.
#pragma once

#include <span>

namespace kvo::fake {

struct EntryPoint {
    const char* name;
    int since;
    void* address;
};

std::span<const EntryPoint> context_entry_points();
std::span<const EntryPoint> memory_entry_points();
std::span<const EntryPoint> stream_entry_points();

}  // namespace kvo::fake
