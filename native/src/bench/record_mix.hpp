// Records of several sizes, each size with its share of the bytes, and how well a pool is used by them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace kvo {

// Draws sizes by their numbers, so that each has its share of the bytes.
class RecordMix {
public:
    RecordMix(std::vector<std::uint64_t> sizes, std::vector<double> byte_shares)
        : sizes_(std::move(sizes)), byte_shares_(std::move(byte_shares)) {
        weigh();
    }

    // The largest share goes to the size that had the first in line, and so on.
    void flip() {
        std::ranges::reverse(byte_shares_);
        weigh();
    }

    std::size_t draw_number(std::mt19937_64& random) { return which_(random); }
    std::uint64_t draw(std::mt19937_64& random) { return sizes_[which_(random)]; }
    const std::vector<std::uint64_t>& sizes() const { return sizes_; }

private:
    void weigh() {
        std::vector<double> weights;
        for (std::size_t i = 0; i < sizes_.size(); ++i) {
            weights.push_back(byte_shares_[i] / static_cast<double>(sizes_[i]));
        }
        which_ = std::discrete_distribution<std::size_t>(weights.begin(), weights.end());
    }

    std::vector<std::uint64_t> sizes_;
    std::vector<double> byte_shares_;
    std::discrete_distribution<std::size_t> which_;
};

// Seen after every record.
class UsageMeter {
public:
    void see(std::uint64_t useful_bytes, std::uint64_t capacity_bytes) {
        const double usage = static_cast<double>(useful_bytes) / static_cast<double>(capacity_bytes);
        sum_ += usage;
        lowest_ = std::min(lowest_, usage);
        ++seen_;
    }

    double mean() const { return seen_ == 0 ? 0 : sum_ / static_cast<double>(seen_); }
    double lowest() const { return lowest_; }

private:
    double sum_ = 0;
    double lowest_ = 1;
    std::uint64_t seen_ = 0;
};

}  // namespace kvo
