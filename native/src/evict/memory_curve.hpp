// Estimates which share of the blocks that engines asked for a pool would have had with less memory and with more.
//
// For each size it keeps a shadow pool of names only, ordered by the same policy. The shadow pools follow a sample of
// all blocks, chosen by hash, with all records of each block, and are smaller in proportion. The curve learns what was
// asked for from the outcome: a block that was used was there; one that was saved was not there and had to be computed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "evict/eviction_policy.hpp"

namespace kvo {

// A model of a pool of another size: it has the names that the pool would hold by now, in a policy's order, but no
// records.

// One record of a pool, as far as its place in the order goes.
struct ShadowRecord {
    std::uint64_t name = 0;    // as the policy has it
    std::uint64_t parent = 0;  // name of the nearest one that it depends on and that is followed too; 0: there is none
    std::uint64_t size_bytes = 0;
    std::uint32_t window_blocks = 0;
    std::uint32_t group = 0;
    Reuse reuse = Reuse::prefix;
    bool needs_state = false;
    std::uint64_t state = 0;  // name of the state that ends with this block, of a block that `needs_state`
};

// One thread.
class ShadowPool {
public:
    // Holds `bounds.entry_limit` records and `bounds.capacity_bytes` of them at most.
    ShadowPool(const MakePolicy& make_policy, PolicyBounds bounds);

    // Begins another request. The records that it uses or brings stay until the next request begins.
    void begin_request();
    // Uses a record. Returns whether the pool held it; from now on it does, if it fits.
    bool use(const ShadowRecord& record);
    // Takes in a record that came without a use. If `for_use`, its first use finds it only for that reason, and is no
    // hit.
    void bring(const ShadowRecord& record, bool for_use);
    void remove(std::uint64_t name);

    bool holds(std::uint64_t name) const noexcept { return find(name) != kNoEntry; }
    std::size_t count() const noexcept { return residents_.size() - free_.size(); }
    std::uint64_t used_bytes() const noexcept { return used_bytes_; }

private:
    struct Resident {
        std::uint64_t name = 0;
        std::uint64_t size_bytes = 0;
        std::uint32_t request = 0;  // that used it last; 0: the number is free
        bool is_for_use = false;
    };

    EntryNumber find(std::uint64_t name) const noexcept;
    std::size_t cell_of(std::uint64_t name) const noexcept;
    void put(EntryNumber entry) noexcept;
    void take_out(std::uint64_t name) noexcept;
    void admit(const ShadowRecord& record, bool is_for_use);
    bool make_room(std::uint64_t size_bytes);
    void forget(EntryNumber entry, bool was_evicted);
    void tell_uses();

    PolicyBounds bounds_;
    std::unique_ptr<EvictionPolicy> policy_;
    std::uint64_t used_bytes_ = 0;
    std::vector<Resident> residents_;  // by entry number
    std::vector<EntryNumber> free_;
    std::vector<EntryNumber> cells_;  // by name, open addresses; a power of two, half of them empty at least
    std::uint32_t request_ = 1;
    std::size_t keeps_left_ = 0;     // of this request, before it is taken for larger than the pool
    std::vector<EntryNumber> used_;  // that the policy has not been told of
};

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
