#include "evict/prefix_reuse.hpp"

#include <algorithm>

namespace kvo {

void ReuseTable::fade() noexcept {
    for (std::size_t kind = 0; kind < kClassCount; ++kind) {
        for (std::size_t age = 0; age < AgeBuckets::kCount; ++age) {
            used_[kind][age] *= 0.5;
            lost_[kind][age] *= 0.5;
        }
    }
}

// How many came to each bucket. One lost in a bucket saw half of it.
auto ReuseTable::count_reached(const Counts& used, const Counts& lost, const Counts& followed) const noexcept
    -> Counts {
    Counts reached{};
    double later = 0.0;
    for (std::size_t age = AgeBuckets::kCount; age-- > 0;) {
        const double unseen = lost[age] + followed[age];
        reached[age] = later + used[age] + 0.5 * unseen;
        later += used[age] + unseen;
    }
    return reached;
}

double ReuseTable::prior_scale(std::size_t kind) noexcept {
    const auto known = static_cast<EntryClass>(kind);
    if (is_used_prefix(known)) {
        return known == kPrefixUsed ? kUsed : kOftenUsed;
    }
    return is_used_end(known) ? kUsed : 1.0;
}

// How many blocks of a prefix were seen for each end. A boundary needs its end as much as its blocks, so both should be
// kept equally long; the few ends tell less about that than the blocks. With states only these are seen.
double ReuseTable::weigh_ends(const Grid& reached) noexcept {
    double blocks = 0.0;
    double ends = 1.0;
    for (std::size_t kind = 0; kind < kClassCount; ++kind) {
        (is_prefix_class(static_cast<EntryClass>(kind)) ? blocks : ends) += reached[kind][0];
    }
    return std::max(1.0, blocks / ends);
}

void ReuseTable::estimate(const Grid& followed) noexcept {
    Grid reached{};
    Counts common{};
    Counts all_used{};
    Counts all_reached{};
    for (std::size_t kind = 0; kind < kClassCount; ++kind) {
        reached[kind] = count_reached(used_[kind], lost_[kind], followed[kind]);
        for (std::size_t age = 0; age < AgeBuckets::kCount; ++age) {
            all_used[age] += used_[kind][age];
            all_reached[age] += reached[kind][age];
        }
    }
    const double end_weight = weigh_ends(reached);
    // Buckets double in length: the same chance in each is a rate that falls as one over the age.
    double before = kFirstChance;
    for (std::size_t age = 0; age < AgeBuckets::kCount; ++age) {
        before = (all_used[age] + kPriorEntries * before) / (all_reached[age] + kPriorEntries);
        common[age] = before;
    }
    for (std::size_t kind = 0; kind < kClassCount; ++kind) {
        const double weight = is_prefix_class(static_cast<EntryClass>(kind)) ? 1.0 : end_weight;
        const double prior_entries = weight * kPriorEntries;
        const double prior_expected = weight * kPriorUses;
        const double prior_uses = prior_expected * prior_scale(kind);
        double uses = prior_uses;
        double expected = prior_expected;
        for (std::size_t age = 0; age < AgeBuckets::kCount; ++age) {
            uses += used_[kind][age];
            expected += reached[kind][age] * common[age];
        }
        if (expected == prior_expected && values_[kind][0] > 0.0 && uses == prior_uses) {
            continue;  // nothing was seen of it
        }
        const double scale = uses / expected;
        Counts chances{};
        for (std::size_t age = 0; age < AgeBuckets::kCount; ++age) {
            const double chance =
                (used_[kind][age] + prior_entries * scale * common[age]) / (reached[kind][age] + prior_entries);
            chances[age] = chance < kMostChance ? chance : kMostChance;
        }
        rate(smooth(chances, reached[kind]), values_[kind]);
    }
}

// Ages 0 and 1 are epochs of their own, in which the requests of one prompt follow each other: their chances stay.
auto ReuseTable::smooth(const Counts& chances, const Counts& reached) const noexcept -> Counts {
    const auto weight = [&](std::size_t age) { return std::min(kMostOfNeighbour, kNeighbourShare * reached[age]); };
    Counts smoothed = chances;
    for (std::size_t age = 2; age + 1 < AgeBuckets::kCount; ++age) {
        const double younger = weight(age - 1);
        const double own = reached[age] + 1.0;
        const double older = weight(age + 1);
        smoothed[age] =
            (younger * chances[age - 1] + own * chances[age] + older * chances[age + 1]) / (younger + own + older);
    }
    return smoothed;
}

void ReuseTable::rate(const Counts& chances, Counts& values) const noexcept {
    for (std::size_t age = 0; age < AgeBuckets::kCount; ++age) {
        double left = 1.0;
        double hits = 0.0;
        double time = 0.0;
        double best = 0.0;
        // Not beyond where even a use of all that are left would not be a better rate.
        for (std::size_t until = age; until < AgeBuckets::kCount && hits + left > best * time; ++until) {
            const double length = AgeBuckets::first_age(until + 1) - AgeBuckets::first_age(until);
            time += left * length * (1.0 - 0.5 * chances[until]);
            hits += left * chances[until];
            left *= 1.0 - chances[until];
            best = hits > best * time ? hits / time : best;
        }
        values[age] = best;
    }
}

}  // namespace kvo
