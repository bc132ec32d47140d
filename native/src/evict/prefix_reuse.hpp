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

#include <array>
#include <cstddef>
#include <cstdint>

#include "evict/prefix_ages.hpp"
#include "evict/prefix_classes.hpp"

namespace kvo {

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
    // Weight of the common shape in each bucket of a class, in entries, and in the class's scale, in uses.
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

    static double prior_scale(std::size_t kind) noexcept;
    Counts count_reached(const Counts& used, const Counts& lost, const Counts& followed) const noexcept;
    Counts smooth(const Counts& chances, const Counts& reached) const noexcept;
    void rate(const Counts& chances, Counts& values) const noexcept;

    Grid used_{};
    Grid lost_{};
    Grid values_{};
};

}  // namespace kvo
