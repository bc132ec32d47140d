// Which segment is given up, and how much of it is kept: pure functions.
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

// Of the older half, so that what is new has had time to be read: the one with the fewest bytes worth keeping for its
// age, where a hot byte counts four times and the age is in segments. So one with a few hot records does not stay for
// ever: they are moved, and the rest goes.
std::optional<Candidate> choose_victim(std::span<Candidate> candidates);

// What may be written again to keep it, so that writes stay in proportion to what is put: it grows by a share of the
// bytes put, up to a limit.
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
