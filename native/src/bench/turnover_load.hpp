// A hybrid model's records in a whole cache: they come in several sizes, are used again at random, and go in the
// policy's order while memory is full.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache_core.hpp"

namespace kvo {

// Records of several sizes, each size with its share of the bytes, and how well a pool is used by them.
//
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

struct TurnoverShape {
    std::uint64_t pool_bytes = 0;
    std::uint64_t segment_bytes = std::uint64_t{1} << 30;
    std::string policy;
    unsigned threads = 2;
    // One group each: the first two are attention, the last one is a recurrent state, those between are windows.
    std::vector<std::uint64_t> record_bytes;
    std::vector<double> byte_shares;  // of what comes
    std::uint64_t seed = 7;
};

struct TurnoverOutcome {
    double mean_usage = 0;  // bytes of records over bytes of segments
    double lowest_usage = 1;
    std::uint64_t offered_bytes = 0;
    std::uint64_t admitted_bytes = 0;
    std::uint64_t moved_bytes = 0;
    std::uint64_t refused = 0;  // records that found no room
    double seconds = 0;
};

// One thread. Nothing is written to the records: moves copy whatever is there.
class TurnoverLoad {
public:
    // Code::invalid if there are fewer than three sizes, or not one share for each.
    static Result<std::unique_ptr<TurnoverLoad>> create(const TurnoverShape& shape);

    // Offers records until they are as many bytes as `turnovers` pools.
    TurnoverOutcome run(double turnovers);

    // Reverses the order of the byte shares for the records to come.
    void flip() { mix_.flip(); }

    CacheStats stats() const { return core_->stats(); }

private:
    using Hash = std::array<std::uint8_t, kHashBytes>;
    struct Stored {
        std::uint64_t number;  // of its hash
        std::size_t group;
    };

    TurnoverLoad(std::unique_ptr<CacheCore> core, std::uint32_t name_space, SessionId session,
                 const TurnoverShape& shape);
    bool store(std::size_t group);
    void use_one_again();
    Hash choose_parent(std::size_t group);

    std::unique_ptr<CacheCore> core_;
    const std::uint32_t name_space_;
    const SessionId session_;
    RecordMix mix_;
    std::mt19937_64 random_;
    std::uint64_t next_number_ = 1;
    std::vector<Hash> newest_;    // by group
    std::vector<Stored> stored_;  // the newest ones, a ring
};

}  // namespace kvo
