#include "evict/memory_curve.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvo {
namespace {

constexpr std::size_t kFewestCells = 64;

}  // namespace

ShadowPool::ShadowPool(const MakePolicy& make_policy, PolicyBounds bounds)
    : bounds_(bounds), policy_(make_policy(bounds)), cells_(kFewestCells, kNoEntry) {}

void ShadowPool::begin_request() {
    tell_uses();
    request_ += request_ + 1 == 0 ? 2 : 1;  // 0 is none
    // A policy offers each entry once before it offers one for the third time.
    keeps_left_ = 2 * count();
}

bool ShadowPool::use(const ShadowRecord& record) {
    const EntryNumber entry = find(record.name);
    if (entry == kNoEntry) {
        admit(record, false);
        return false;
    }
    Resident& resident = residents_[entry];
    resident.request = request_;
    used_.push_back(entry);
    return !std::exchange(resident.is_for_use, false);
}

void ShadowPool::bring(const ShadowRecord& record, bool for_use) {
    if (!holds(record.name)) {
        admit(record, for_use);
    }
}

void ShadowPool::remove(std::uint64_t name) {
    if (const EntryNumber entry = find(name); entry != kNoEntry) {
        tell_uses();
        forget(entry, false);
    }
}

// Takes the high bits, since the names of one space may be alike in all others.
std::size_t ShadowPool::cell_of(std::uint64_t name) const noexcept {
    return static_cast<std::size_t>((name * 0x9e3779b97f4a7c15) >> 32) & (cells_.size() - 1);
}

EntryNumber ShadowPool::find(std::uint64_t name) const noexcept {
    for (std::size_t cell = cell_of(name);; cell = (cell + 1) & (cells_.size() - 1)) {
        if (cells_[cell] == kNoEntry || residents_[cells_[cell]].name == name) {
            return cells_[cell];
        }
    }
}

void ShadowPool::put(EntryNumber entry) noexcept {
    std::size_t cell = cell_of(residents_[entry].name);
    while (cells_[cell] != kNoEntry) {
        cell = (cell + 1) & (cells_.size() - 1);
    }
    cells_[cell] = entry;
}

// Those behind it move up, so that none is looked for behind an empty cell.
void ShadowPool::take_out(std::uint64_t name) noexcept {
    const std::size_t mask = cells_.size() - 1;
    std::size_t hole = cell_of(name);
    while (residents_[cells_[hole]].name != name) {
        hole = (hole + 1) & mask;
    }
    for (std::size_t cell = (hole + 1) & mask; cells_[cell] != kNoEntry; cell = (cell + 1) & mask) {
        const std::size_t home = cell_of(residents_[cells_[cell]].name);
        if (((cell - home) & mask) >= ((cell - hole) & mask)) {
            cells_[hole] = cells_[cell];
            hole = cell;
        }
    }
    cells_[hole] = kNoEntry;
}

void ShadowPool::admit(const ShadowRecord& record, bool is_for_use) {
    tell_uses();
    if (!make_room(record.size_bytes)) {
        return;
    }
    if (2 * (count() + 1) > cells_.size()) {
        cells_.assign(2 * cells_.size(), kNoEntry);
        for (EntryNumber entry = 0; entry < residents_.size(); ++entry) {
            if (residents_[entry].request != 0) {
                put(entry);
            }
        }
    }
    if (free_.empty()) {
        free_.push_back(static_cast<EntryNumber>(residents_.size()));
        residents_.emplace_back();
    }
    const EntryNumber entry = free_.back();
    free_.pop_back();
    const EntryNumber parent = record.parent == 0 ? kNoEntry : find(record.parent);
    residents_[entry] = {
        .name = record.name, .size_bytes = record.size_bytes, .request = request_, .is_for_use = is_for_use};
    put(entry);
    used_bytes_ += record.size_bytes;
    policy_->admit({.entry = entry,
                    .parent = parent,
                    .name = record.name,
                    .size_bytes = record.size_bytes,
                    .reuse = record.reuse,
                    .needs_state = record.needs_state,
                    .window_blocks = record.window_blocks,
                    .group = record.group});
}

// Evicts until the record fits. Returns false if the running request's own records leave no room for it.
bool ShadowPool::make_room(std::uint64_t size_bytes) {
    if (size_bytes > bounds_.capacity_bytes) {
        return false;
    }
    while (used_bytes_ + size_bytes > bounds_.capacity_bytes || count() >= bounds_.entry_limit) {
        const EntryNumber victim = policy_->choose_victim();
        if (victim == kNoEntry) {
            return false;
        }
        if (residents_[victim].request != request_) {
            forget(victim, true);
        } else if (keeps_left_ > 0) {
            keeps_left_ -= 1;
            policy_->keep(victim);
        } else {
            return false;
        }
    }
    return true;
}

void ShadowPool::forget(EntryNumber entry, bool was_evicted) {
    policy_->remove(entry, was_evicted);
    used_bytes_ -= residents_[entry].size_bytes;
    take_out(residents_[entry].name);
    residents_[entry].request = 0;
    free_.push_back(entry);
}

void ShadowPool::tell_uses() {
    if (!used_.empty()) {
        policy_->touch(used_);
        used_.clear();
    }
}

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
