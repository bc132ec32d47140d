// Decides which segment to evict, and how many of its records to keep.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace kvo {

struct Candidate {
    std::uint32_t segment = 0;
    std::uint64_t generation = 0;
    std::uint64_t live_bytes = 0;
    std::uint64_t hot_bytes = 0;
};

// Chooses from the older half, so that new records have had time to be read: the segment with the fewest bytes worth
// keeping for its age, where a hot byte counts four times and the age is in segments. So a segment with a few hot
// records does not stay for ever: these are moved, and the rest is evicted.
std::optional<Candidate> choose_victim(std::span<Candidate> candidates);

// Bytes of records that may be written again to keep them. It grows by a share of the bytes put, up to a limit, so
// moves stay in proportion to puts.
class MoveAllowance {
public:
    MoveAllowance(double share, std::uint64_t limit_bytes) : share_(share), limit_(static_cast<double>(limit_bytes)) {}

    void add_put(std::uint64_t bytes);
    bool take(std::uint64_t bytes);  // false: too little is left, and nothing is taken

private:
    double share_;
    double limit_;
    double left_ = 0;
};

}  // namespace kvo
