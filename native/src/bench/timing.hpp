// The result of a measured call.
#pragma once

#include <cstdint>

namespace kvo {

// `done`: number of records, hashes or leased blocks that turned out as they should. A caller that needs all of them
// must compare.
struct Timing {
    double seconds = 0;
    std::uint64_t done = 0;
};

}  // namespace kvo
