#include "evict/memory_curve.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvo {
namespace {

constexpr std::uint32_t kMostLevels = 20;
// Pools of all sizes together hold so many quarters of what the pool itself holds.
constexpr std::uint64_t kAllQuarters = 1 + 2 + 4 + 8 + 16;

// A few blocks that are used very often, as those that all prompts begin with, are in the sample or not. They are hits
// in a pool of any size, so what the sample has too few of is counted as hits, and what it has too many of is not.
std::uint64_t scale_hits(std::uint64_t hits, std::uint64_t sampled, std::uint64_t asked, std::uint32_t level) {
    // Hits of a run come with its state, when what was sampled may have been halved.
    const std::uint64_t others = (sampled - std::min(sampled, hits)) << level;
    return asked - std::min(asked, others);
}

}  // namespace

MemoryCurve::MemoryCurve(MemoryCurveTerms terms) : terms_(std::move(terms)) { begin(0); }

// Starts over with empty pools and counters.
void MemoryCurve::begin(std::uint32_t level) {
    level_ = std::min(level, kMostLevels);
    pools_.clear();
    for (const std::uint32_t quarters : kQuarters) {
        const std::uint64_t entries = std::uint64_t{terms_.pool.entry_limit} * quarters / 4 >> level_;
        pools_.emplace_back(
            terms_.make_policy,
            PolicyBounds{.entry_limit = static_cast<EntryNumber>(std::clamp<std::uint64_t>(entries, 1, kNoEntry - 1)),
                         .capacity_bytes = terms_.pool.capacity_bytes / 4 * quarters >> level_});
    }
    asked_ = sampled_ = {};
    hits_ = {};
    since_fade_ = 0;
}

void MemoryCurve::take(const PoolNote& note) {
    if (note.sample <= sample_limit()) {
        choose_sample(note);
    }
    asked_.add(note.passed);
    if (note.sample > sample_limit()) {
        return;
    }
    const ShadowRecord& record = note.record;
    if (note.kind == PoolNote::Kind::removal) {
        for (ShadowPool& pool : pools_) {
            pool.remove(record.name);
        }
        return;
    }
    const bool is_prefix = record.reuse == Reuse::prefix;
    // Blocks that are asked for one by one are one request if they follow each other.
    const bool goes_on = is_prefix && record.parent == last_prefix_;
    const bool begins = note.kind == PoolNote::Kind::use ? note.begins && !goes_on : is_prefix && !goes_on;
    if (begins) {
        for (ShadowPool& pool : pools_) {
            pool.begin_request();
        }
        runs_ = {};
    }
    last_prefix_ = is_prefix ? record.name : last_prefix_;
    if (note.kind == PoolNote::Kind::promotion || note.kind == PoolNote::Kind::adoption) {
        for (ShadowPool& pool : pools_) {
            pool.bring(record, note.kind == PoolNote::Kind::promotion);
        }
        return;
    }
    // A used record that even the largest pool does not know came before the curve began to follow. It does not count.
    count(record, note.kind == PoolNote::Kind::save || pools_.back().holds(record.name));
}

// Chooses the first sample as if the pool were full of records like this one. If they turn out to be smaller and too
// many, starts over with half of the sample.
void MemoryCurve::choose_sample(const PoolNote& note) {
    if (std::exchange(has_begun_, true)) {
        if (records() > terms_.record_limit + terms_.record_limit / 4 && level_ < kMostLevels) {
            begin(level_ + 1);
        }
        return;
    }
    const std::uint64_t fit = std::min<std::uint64_t>(
        terms_.pool.entry_limit, terms_.pool.capacity_bytes / std::max<std::uint64_t>(note.record.size_bytes, 1));
    std::uint32_t level = 0;
    while (fit * kAllQuarters / 4 >> level > terms_.record_limit && level < kMostLevels) {
        level += 1;
    }
    begin(level);
}

void MemoryCurve::count(const ShadowRecord& record, bool is_counted) {
    for (std::size_t at = 0; at < pools_.size(); ++at) {
        if (const PoolShare found = use(at, record); is_counted) {
            hits_[at].add(found);
        }
    }
    if (is_counted) {
        sampled_.add(record);
        since_fade_ += 1;
        fade();
        return;
    }
    PoolShare unknown;
    unknown.add(record);
    asked_.blocks -= std::min(asked_.blocks, unknown.blocks << level_);
    asked_.bytes -= std::min(asked_.bytes, unknown.bytes << level_);
}

// Returns the records that count as found with this one. If boundaries need states, these are the blocks since the last
// state, counted at the next block whose state is there.
PoolShare MemoryCurve::use(std::size_t at, const ShadowRecord& record) {
    Run& run = runs_[at];
    const bool has_state = record.needs_state && pools_[at].holds(record.state);
    PoolShare found;
    if (pools_[at].use(record)) {
        found.add(record);
    }
    if (!record.needs_state) {
        return found;
    }
    has_states_ = true;
    run.is_broken = run.is_broken || found.blocks == 0;
    if (run.is_broken) {
        return {};
    }
    run.behind.add(found);
    return has_state ? std::exchange(run.behind, {}) : PoolShare{};
}

void MemoryCurve::fade() {
    static_assert(kQuarters[2] == 4, "the pool's own size");
    if (!terms_.fades || since_fade_ < std::max(kLeastPerFade, kTurnoversPerFade * pools_[2].count())) {
        return;
    }
    since_fade_ = 0;
    const auto halve = [](PoolShare& share) { share = {.blocks = share.blocks / 2, .bytes = share.bytes / 2}; };
    halve(asked_);
    halve(sampled_);
    std::ranges::for_each(hits_, halve);
}

std::size_t MemoryCurve::records() const noexcept {
    std::size_t count = 0;
    for (const ShadowPool& pool : pools_) {
        count += pool.count();
    }
    return count;
}

MemoryCurve::Counts MemoryCurve::counts() const {
    Counts counts{.one_in = 1U << level_, .asked = asked_};
    if (has_states_ && level_ > 0) {
        counts.asked = {};
        return counts;
    }
    std::ranges::transform(hits_, counts.hits.begin(), [this](const PoolShare& hits) {
        return PoolShare{scale_hits(hits.blocks, sampled_.blocks, asked_.blocks, level_),
                         scale_hits(hits.bytes, sampled_.bytes, asked_.bytes, level_)};
    });
    return counts;
}

}  // namespace kvo
