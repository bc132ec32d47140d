// Time and age for the prefix policy: the clock counts epochs, a sixty-fourth of the cache's turnover each.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvo {

// Ages in epochs fall into buckets, two for each doubling.
struct AgeBuckets {
    static constexpr std::size_t kCount = 32;

    static constexpr std::size_t bucket_of(std::uint32_t age) noexcept {
        if (age < 2) {
            return age;
        }
        const auto width = static_cast<std::size_t>(std::bit_width(age));
        const std::size_t bucket = 2 * (width - 1) + ((age >> (width - 2)) & 1);
        return bucket < kCount ? bucket : kCount - 1;
    }

    static constexpr std::uint32_t first_age(std::size_t bucket) noexcept {
        return static_cast<std::uint32_t>(bucket < 2 ? bucket : (2 + (bucket & 1)) << (bucket / 2 - 1));
    }
};

// The past, cut into steps that get longer with their age: seven or eight of each length, one epoch, two, four, ...
// Steps only ever merge, so a list per step needs no walk when time passes. A step's slot is its number here.
class AgeLadder {
public:
    static constexpr std::size_t kLevels = 10;
    static constexpr std::size_t kSteps = 8;  // of a level
    static constexpr std::size_t kSlots = kLevels * kSteps;

    std::uint64_t now() const noexcept { return now_; }

    // Epochs are kept in 16 bits; what is older than that counts as younger than it is.
    std::uint32_t age_of(std::uint16_t epoch) const noexcept { return static_cast<std::uint16_t>(now_ - epoch); }

    std::size_t slot_of(std::uint16_t epoch) const noexcept {
        const std::uint32_t age = age_of(epoch);
        const std::uint64_t then = now_ < age ? 0 : now_ - age;
        for (std::size_t level = 0; level < kLevels; ++level) {
            if ((then >> level) >= begins_[level]) {
                return slot(level, then >> level);
            }
        }
        return slot(kLevels - 1, begins_[kLevels - 1]);
    }

    // One epoch on. merge(from, into) is called for slots whose steps become one; `from` is then empty.
    template <typename Merge>
    void advance(Merge merge) {
        make_place(0, now_ + 1, merge);
        ++now_;
    }

    // visit(slot, age of its middle) for all steps there are, newest first.
    template <typename Visit>
    void each_slot(Visit visit) const {
        std::uint64_t end = now_ + 1;
        for (std::size_t level = 0; level < kLevels && end > 0; ++level) {
            for (std::uint64_t step = end; step-- > begins_[level];) {
                const std::uint64_t middle = (step << level) + (std::uint64_t{1} << level) / 2;
                visit(slot(level, step), static_cast<std::uint32_t>(now_ - (middle < now_ ? middle : now_)));
            }
            end = begins_[level] / 2;
        }
    }

private:
    static constexpr std::size_t slot(std::size_t level, std::uint64_t step) noexcept {
        return level * kSteps + step % kSteps;
    }

    // Step `end` of `level` is about to begin: the two oldest go up one level if there are four already.
    template <typename Merge>
    void make_place(std::size_t level, std::uint64_t end, Merge& merge) {
        std::uint64_t& begin = begins_[level];
        if (end - begin < kSteps) {
            return;
        }
        if (level + 1 == kLevels) {
            merge(slot(level, begin), slot(level, begin + 1));
            begin += 1;
            return;
        }
        const std::uint64_t above = begin / 2;
        make_place(level + 1, above, merge);
        merge(slot(level, begin), slot(level + 1, above));
        merge(slot(level, begin + 1), slot(level + 1, above));
        begin += 2;
    }

    std::uint64_t now_ = 0;
    std::array<std::uint64_t, kLevels> begins_{};  // the oldest step of each level, in its own unit
};

}  // namespace kvo
