// What the prefix policy has learned about reuse: how likely an entry of a class is used again, by its age.
//
// A class's entries are followed from one use to the next, also after their eviction while their name is remembered.
// Per age bucket: how many came that far, how many of them were used in it (the Kaplan-Meier estimate: those that were
// lost sight of count as long as they were seen). Little seen: the shape of all classes together, scaled to the class.
//
// When what is used lately is not what the past lets expect, as after a shift of the traffic, what was seen lately
// counts more, for each class and age by itself, until the past has become like it.
//
// An entry's value is the best rate of hits per time of its place that any waiting time gives (the Gittins index): high
// where reuse is near, lower where it is certain but far, and it may rise with age.
#pragma once

#include <algorithm>
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

    void count_use(std::size_t kind, std::uint32_t age) noexcept {
        const std::size_t bucket = AgeBuckets::bucket_of(age);
        used_[kind][bucket] += 1.0;
        lately_used_[kind][bucket] += 1.0;
    }
    void count_loss(std::size_t kind, std::uint32_t age) noexcept { lost_[kind][AgeBuckets::bucket_of(age)] += 1.0; }

    // The past counts half from now on.
    void fade() noexcept;

    // `followed`: how many are neither used again nor lost yet, by class and age. `epochs`: since the last time.
    void estimate(const Grid& followed, std::uint64_t epochs) noexcept;

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
    // So many entries of the common shape are mixed into each bucket of a class, so many uses into its scale.
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

    // What was seen lately is worth half after so many epochs: half a turnover.
    static constexpr double kLatelyEpochs = 32.0;
    static constexpr std::uint64_t kEpochsPerLook = 8;
    static constexpr std::uint64_t kPastEpochs = 256;  // before that there is no past to be unlike
    static constexpr std::size_t kLeastAge = 4;        // in buckets: what is younger is used within one prompt
    static constexpr std::size_t kSpan = 8;            // buckets whose uses are compared together: single ones vary
    // By chance up to three in ten uses are not those that were to be expected, and more where few are. From four in
    // ten on, what was seen lately counts in full, beside so many entries that do as the past says.
    static constexpr double kLeastUnlike = 0.3;
    static constexpr double kUnlike = 0.4;
    static constexpr double kFewUses = 400.0;
    static constexpr double kPastEntries = 20.0;

    static double prior_scale(std::size_t kind) noexcept;
    Counts count_reached(const Counts& used, const Counts& lost, const Counts& followed) const noexcept;
    // Nothing is older than the table, and of the last bucket nothing is told.
    std::size_t oldest_bucket() const noexcept {
        const auto age = static_cast<std::uint32_t>(std::min<std::uint64_t>(epochs_, UINT32_MAX));
        return std::min(AgeBuckets::bucket_of(age), AgeBuckets::kCount - 2);
    }
    void look_at_lately(const Grid& followed) noexcept;
    double lately_reached(std::size_t kind, std::size_t age) const noexcept {
        return lately_passed_[kind][age] + 0.5 * lately_used_[kind][age];
    }
    double share_unlike() const noexcept;
    Counts with_lately(std::size_t kind, const Counts& chances) const noexcept;
    Counts smooth(const Counts& chances, const Counts& reached) const noexcept;
    void rate(const Counts& chances, Counts& values) const noexcept;

    Grid used_{};
    Grid lost_{};
    Grid values_{};

    Grid chances_{};        // of the past
    Grid lately_used_{};    // fading
    Grid lately_passed_{};  // the same of those that came through an age unused, in shares of its bucket
    std::uint64_t epochs_ = 0;
    std::uint64_t epochs_since_look_ = 0;
    double weight_of_lately_ = 0.0;
};

}  // namespace kvo
