// Estimates which share of the blocks that engines asked for a pool would have had with less memory and with more.
//
// For each size it keeps a shadow pool of names only, ordered by the same policy. The shadow pools follow a sample of
// all blocks, chosen by hash, with all records of each block, and are smaller in proportion. The curve learns what was
// asked for from the outcome: a block that was used was there; one that was saved was not there and had to be computed.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "evict/shadow_pool.hpp"

namespace kvo {

// Records of a pool, counted.
struct PoolShare {
    std::uint64_t blocks = 0;  // those of groups that keep prefixes
    std::uint64_t bytes = 0;   // of all groups

    void add(const ShadowRecord& record) noexcept {
        blocks += record.reuse == Reuse::prefix ? 1 : 0;
        bytes += record.size_bytes;
    }
    void add(const PoolShare& other) noexcept {
        blocks += other.blocks;
        bytes += other.bytes;
    }
};

// An event of a record of the pool.
struct PoolNote {
    enum class Kind : std::uint8_t {
        use,        // an engine read it
        save,       // an engine computed it, since the pool did not have it
        promotion,  // it came from a slower tier, since the pool did not have it; a use follows
        adoption,   // it was there before anything was followed
        removal,    // it was taken away, and not for want of room
    };

    ShadowRecord record;
    std::uint64_t sample = 0;  // see MemoryCurve::sample_of
    Kind kind = Kind::use;
    bool begins = false;    // a request; of what is saved the curve knows it by itself
    PoolShare passed = {};  // that was used or saved since the note before, this one and those outside the sample too
};

struct MemoryCurveTerms {
    PolicyBounds pool;
    MakePolicy make_policy;
    std::uint64_t seed = 0;
    std::uint64_t record_limit = 0;  // of all shadow pools together, about
    bool fades = true;               // what is long ago counts less; else all counts alike
};

// One thread.
class MemoryCurve {
public:
    // Memories by which the pool is followed: quarters of its own.
    static constexpr std::array<std::uint32_t, 5> kQuarters = {1, 2, 4, 8, 16};
    static constexpr std::uint64_t kRecordBytes = 96;  // memory that one of `record_limit` takes, about

    struct Counts {
        std::uint32_t one_in = 1;  // of so many blocks one is followed
        PoolShare asked;
        std::array<PoolShare, kQuarters.size()> hits = {};
    };

    explicit MemoryCurve(MemoryCurveTerms terms);

    // Returns the number by which a block is in the sample or not. `hash_word` is any 64 bits of its hash, the same for
    // all its records.
    std::uint64_t sample_of(std::uint64_t hash_word) const noexcept {
        std::uint64_t bits = (hash_word ^ terms_.seed) * 0xbf58476d1ce4e5b9;
        bits ^= bits >> 32;
        return bits * 0x94d049bb133111eb;
    }
    // The largest number of `sample_of` that is in the sample.
    std::uint64_t sample_limit() const noexcept { return ~std::uint64_t{0} >> level_; }
    // Takes an event. For blocks outside the sample, only `passed` counts.
    void take(const PoolNote& note);

    // Returns empty counts if groups have states and only a sample is followed: the sample does not show at which
    // blocks a hit may end.
    Counts counts() const;

private:
    // State of the running request in one pool, used if boundaries need states.
    struct Run {
        PoolShare behind;  // blocks since the last state, all of them here
        bool is_broken = false;
    };

    static constexpr std::uint64_t kLeastPerFade = 8192;
    static constexpr std::uint64_t kTurnoversPerFade = 4;

    void begin(std::uint32_t level);
    void choose_sample(const PoolNote& note);
    void count(const ShadowRecord& record, bool is_counted);
    PoolShare use(std::size_t at, const ShadowRecord& record);
    void fade();
    std::size_t records() const noexcept;

    const MemoryCurveTerms terms_;
    bool has_begun_ = false;
    std::uint32_t level_ = 0;  // of 2**level_ blocks one is followed
    std::vector<ShadowPool> pools_;
    std::array<Run, kQuarters.size()> runs_ = {};
    bool has_states_ = false;
    std::uint64_t last_prefix_ = 0;  // name of the latest block that was used or saved
    std::uint64_t since_fade_ = 0;
    PoolShare asked_;    // of all blocks
    PoolShare sampled_;  // of those that are followed
    std::array<PoolShare, kQuarters.size()> hits_ = {};
};

}  // namespace kvo
