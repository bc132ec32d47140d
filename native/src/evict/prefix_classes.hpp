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
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvo {

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

}  // namespace kvo
