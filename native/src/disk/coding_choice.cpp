#include "disk/coding_choice.hpp"

#include <algorithm>

namespace kvo {
namespace {

constexpr std::uint32_t kFailureLimit = 16;  // in a row
constexpr std::uint32_t kSkips = 255;        // records that are not tried then, for one that is
constexpr double kLearning = 0.1;            // how much of what a group's ratio is said to be the newest record decides
constexpr double kOneKind = 7.0 / 8;         // of a period's bytes: it is taken for all coded, or all plain
constexpr double kReadMargin = 1.03;         // so many times as fast coded records must come
constexpr double kDecodeMargin = 0.9;        // of the speed of decoding: what arrives must not wait for it

}  // namespace

void CodingChoice::Speed::add(std::uint64_t more, Time taken) {
    if (bytes > 2.0 * kKnownBytes) {
        bytes /= 2;
        seconds /= 2;
    }
    bytes += static_cast<double>(more);
    seconds += std::chrono::duration<double>(taken).count();
}

void CodingChoice::told_read(std::uint64_t plain, std::uint64_t coded, Time taken) {
    const double one_kind = kOneKind * static_cast<double>(plain + coded);
    if (plain > 0 && static_cast<double>(plain) >= one_kind) {
        plain_.add(plain + coded, taken);
    } else if (coded > 0 && static_cast<double>(coded) >= one_kind) {
        coded_.add(plain + coded, taken);
    }
}

// Before enough coded records were read it is tried, where decoding would keep up.
bool CodingChoice::comes_sooner(const Group& group) const {
    if (coded_.is_known()) {
        return coded_.rate() > kReadMargin * plain_.rate();
    }
    return decoding_.bytes == 0 || group.ratio * plain_.rate() < kDecodeMargin * decoding_.rate();
}

bool CodingChoice::chooses(const Group& group, std::uint64_t length) {
    if (!plain_.is_known()) {
        return false;
    }
    asked_bytes_ += length;
    if (asked_bytes_ > trial_at_bytes_ + kKnownBytes) {
        trial_at_bytes_ += std::min(trial_at_bytes_, kTrialEveryBytes);
    }
    const bool is_trial = asked_bytes_ > trial_at_bytes_;
    return !is_behind_ && comes_sooner(group) != is_trial;
}

bool CodingChoice::wants(std::uint32_t number, std::uint64_t length) {
    Group& group = group_of(number);
    if (coding_ == DiskCoding::off || (coding_ == DiskCoding::automatic && !chooses(group, length))) {
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
