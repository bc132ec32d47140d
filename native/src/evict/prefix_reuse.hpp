// The prefix policy's estimates of reuse: how likely an entry of a class is used again, by its age.
//
// The policy follows a class's entries from one use to the next, even after their eviction, as long as it remembers
// their names. For each age bucket it counts how many entries came that far and how many were used in it (the
// Kaplan-Meier estimate: entries that were lost count for the time that they were seen). A class with few entries takes
// the shape of all classes together, scaled to the class.
//
// An entry's value is the best rate of hits per time of its place that any waiting time gives (the Gittins index): high
// where reuse is near, lower where it is certain but far, and it may rise with age.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvo {

// Time and age for the prefix policy: the clock counts epochs, a sixty-fourth of the cache's turnover each.

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

// Classes of entries that are expected to behave alike, so the policy can learn from some of them about the others.
//
//     block of a prefix     fresh: how far behind the start of its run     used: how often
//     ... behind a hit      fresh: the same, of a run behind used blocks
//     ... behind a start    fresh: the same, of a run behind blocks of the highest step of uses: most prompts begin so
//     end of a boundary     fresh: the same of its block                   used: how often
//     ... that was passed   a later one of the same sequence exists        used: how often
//
// A run is a series of blocks that one request added and that no list of evicted names contains. An end is a state, or
// a window block of an engine without states. Entries whose worth depends only on others have no class.

using EntryClass = std::uint8_t;

constexpr EntryClass kFreshSteps = 6;   // 1, 2-3, 4-7, 8-15, 16-31, 32 and more
constexpr EntryClass kBehindSteps = 3;  // 1, 2-7, 8 and more
constexpr EntryClass kCoarseSteps = 3;  // 1-3, 4-15, 16 and more
constexpr EntryClass kPrefixUses = 6;
constexpr EntryClass kEndUses = 4;

constexpr EntryClass kPrefixFresh = 0;
constexpr EntryClass kPrefixBehind = kPrefixFresh + kFreshSteps;
constexpr EntryClass kPrefixStarted = kPrefixBehind + kBehindSteps;
constexpr EntryClass kPrefixUsed = kPrefixStarted + kCoarseSteps;
constexpr EntryClass kEndFresh = kPrefixUsed + kPrefixUses;
constexpr EntryClass kEndUsed = kEndFresh + kCoarseSteps;
constexpr EntryClass kPassed = kEndUsed + kEndUses;
constexpr EntryClass kClassCount = kPassed + kEndUses + 1;

constexpr EntryClass kUseless = kClassCount;  // a place in the queues, nothing is learned about it
constexpr EntryClass kNoClass = 31;
static_assert(kUseless < kNoClass);

// The `position`th block of its run, counted from 1.
constexpr EntryClass fresh_step(std::uint32_t position) noexcept {
    return static_cast<EntryClass>(std::clamp(static_cast<int>(std::bit_width(position)) - 1, 0, kFreshSteps - 1));
}

// The same in steps that are twice as long.
constexpr EntryClass coarse_step(std::uint32_t position) noexcept {
    return static_cast<EntryClass>(fresh_step(position) / 2);
}

// The class of a run's first block by that of the block before it.
constexpr EntryClass run_class(EntryClass before) noexcept {
    if (before < kPrefixUsed || before >= kEndFresh) {
        return kPrefixFresh;
    }
    return before + 1 == kEndFresh ? kPrefixStarted : kPrefixBehind;
}

// The class of the `position`th block of a run whose first block has class `first`.
constexpr EntryClass prefix_class(EntryClass first, std::uint32_t position) noexcept {
    switch (first) {
        case kPrefixBehind:
            return static_cast<EntryClass>(first + (position < 2 ? 0 : position < 8 ? 1 : 2));
        case kPrefixStarted:
            return static_cast<EntryClass>(first + coarse_step(position));
        default:
            return static_cast<EntryClass>(first + fresh_step(position));
    }
}

constexpr bool is_prefix_class(EntryClass kind) noexcept { return kind < kEndFresh; }
constexpr bool is_used_prefix(EntryClass kind) noexcept { return kind >= kPrefixUsed && kind < kEndFresh; }
constexpr bool is_used_end(EntryClass kind) noexcept { return kind >= kEndUsed && kind < kPassed; }

// One more of uses that are counted in steps which double: 1-2, 3-6, 7-14, ... on average. `chance` is any number.
constexpr EntryClass after_use(EntryClass first, int step, EntryClass steps, std::uint64_t chance) noexcept {
    const bool is_next = step + 1 < steps && (chance & ((std::uint64_t{2} << step) - 1)) == 0;
    return static_cast<EntryClass>(first + step + (is_next ? 1 : 0));
}

// The class after one more use.
constexpr EntryClass class_after_use(EntryClass kind, std::uint64_t chance) noexcept {
    if (is_prefix_class(kind)) {
        return kind < kPrefixUsed ? kPrefixUsed : after_use(kPrefixUsed, kind - kPrefixUsed, kPrefixUses, chance);
    }
    if (kind < kEndUsed || kind == kPassed) {
        return kEndUsed;
    }
    return after_use(kEndUsed, kind - (kind < kPassed ? kEndUsed : kPassed + 1), kEndUses, chance);
}

// The class of an end when a later end of its sequence came.
constexpr EntryClass class_when_passed(EntryClass kind) noexcept {
    if (is_prefix_class(kind) || kind >= kPassed) {
        return kind;
    }
    return kind < kEndUsed ? kPassed : static_cast<EntryClass>(kind - kEndUsed + 1 + kPassed);
}

class ReuseTable {
public:
    using Counts = std::array<double, AgeBuckets::kCount>;
    using Grid = std::array<Counts, kClassCount>;

    void count_use(std::size_t kind, std::uint32_t age) noexcept { used_[kind][AgeBuckets::bucket_of(age)] += 1.0; }
    void count_loss(std::size_t kind, std::uint32_t age) noexcept { lost_[kind][AgeBuckets::bucket_of(age)] += 1.0; }

    // The past counts half from now on.
    void fade() noexcept;

    // `followed`: how many are neither used again nor lost yet, by class and age.
    void estimate(const Grid& followed) noexcept;

    // Between the beginnings of two buckets in proportion: of entries that are nearly as old as the memory reaches
    // back, all are in one or two of them.
    double value(std::size_t kind, std::uint32_t age) const noexcept {
        const std::size_t bucket = AgeBuckets::bucket_of(age);
        const double here = values_[kind][bucket];
        if (bucket + 1 == AgeBuckets::kCount) {
            return here;
        }
        const std::uint32_t first = AgeBuckets::first_age(bucket);
        const double part = static_cast<double>(age - first) / (AgeBuckets::first_age(bucket + 1) - first);
        return here + part * (values_[kind][bucket + 1] - here);
    }

private:
    // Weight of the common shape in each bucket of a class, in entries, and in the class's scale, in uses. An end's
    // weigh more where it has many blocks.
    static constexpr double kPriorEntries = 50.0;
    static constexpr double kPriorUses = 20.0;
    static constexpr double kFirstChance = 0.01;  // before anything was seen: an LRU list of those used alike
    static constexpr double kUsed = 2.0;          // and so many times the chance of a fresh one
    static constexpr double kOftenUsed = 4.0;     // of a block of a prefix
    static constexpr double kMostChance = 0.95;
    // A bucket's neighbours count as this share of those that reached them, and as so many at most: where much was
    // seen, each speaks for itself.
    static constexpr double kNeighbourShare = 0.3;
    static constexpr double kMostOfNeighbour = 300.0;

    static double weigh_ends(const Grid& reached) noexcept;
    static double prior_scale(std::size_t kind) noexcept;
    Counts count_reached(const Counts& used, const Counts& lost, const Counts& followed) const noexcept;
    Counts smooth(const Counts& chances, const Counts& reached) const noexcept;
    void rate(const Counts& chances, Counts& values) const noexcept;

    Grid used_{};
    Grid lost_{};
    Grid values_{};
};

}  // namespace kvo
