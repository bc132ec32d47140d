// What a measured call says of itself.
#pragma once

#include <cstdint>

namespace kvo {

// `done`: records, hashes or leased blocks that turned out as they should. Whoever counts on all of them compares.
struct Timing {
    double seconds = 0;
    std::uint64_t done = 0;
};

}  // namespace kvo
