#include "disk/coding_choice.hpp"

namespace kvo {
namespace {

constexpr std::uint32_t kFailureLimit = 16;  // in a row
constexpr std::uint32_t kSkips = 255;        // records that are not tried then, for one that is
constexpr double kLearning = 0.1;            // how much of what a group's ratio is said to be the newest record decides
constexpr double kForgetBytes = 256.0 * (1 << 20);
constexpr double kKnownBytes = 16.0 * (1 << 20);
constexpr double kMargin = 0.9;  // of the speed at which coding would gain nothing

}  // namespace

void CodingChoice::Speed::add(std::uint64_t more, Time taken) {
    if (bytes > kForgetBytes) {
        bytes /= 2;
        seconds /= 2;
    }
    bytes += static_cast<double>(more);
    seconds += std::chrono::duration<double>(taken).count();
}

// Reading a byte of a record takes 1 / read, or 1 / (ratio * read) and then 1 / decode. Neither overlaps for sure.
bool CodingChoice::is_faster(const Group& group) const {
    if (reading_.bytes < kKnownBytes) {
        return false;
    }
    const bool is_first = decoding_.bytes == 0;  // it takes a trial to know
    return is_first || reading_.rate() < kMargin * decoding_.rate() * (1 - 1 / group.ratio);
}

bool CodingChoice::wants(std::uint32_t number) {
    Group& group = group_of(number);
    if (coding_ == DiskCoding::off || (coding_ == DiskCoding::automatic && !is_faster(group))) {
        return false;
    }
    if (group.failures >= kFailureLimit && group.skipped < kSkips) {
        ++group.skipped;
        return false;
    }
    group.skipped = 0;
    return true;
}

void CodingChoice::told_coded(std::uint32_t number, std::uint64_t before, std::uint64_t after) {
    Group& group = group_of(number);
    group.failures = after < before ? 0 : group.failures + (group.failures < kFailureLimit ? 1 : 0);
    const double ratio = static_cast<double>(before) / static_cast<double>(after);
    group.ratio += kLearning * (ratio - group.ratio);
}

}  // namespace kvo
