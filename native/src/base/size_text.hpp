// Sizes as people read them, in faults.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>

namespace kvo {

// Three digits and a unit: 23.5GiB, 128MiB, 5B.
inline std::string describe_size(std::uint64_t bytes) {
    constexpr std::array<const char*, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) {
        return std::to_string(bytes) + "B";
    }
    double count = static_cast<double>(bytes) / 1024;
    std::size_t unit = 0;
    while (count >= 1024 && unit + 1 < kUnits.size()) {
        count /= 1024;
        ++unit;
    }
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), count < 1000 ? "%.3g%s" : "%.0f%s", count, kUnits[unit]);
    return text.data();
}

}  // namespace kvo
