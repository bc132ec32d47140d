#include "fake_cuda/happens_before.hpp"

#include <algorithm>
#include <iterator>

namespace kvo::fake {
namespace {

bool happened_before(const Accessor& earlier, const VectorClock& known) {
    return known.at(earlier.actor) >= earlier.count;
}

}  // namespace

std::uint64_t VectorClock::tick(Actor actor) {
    if (actor >= counts_.size()) {
        counts_.resize(actor + 1);
    }
    return ++counts_[actor];
}

void VectorClock::join(const VectorClock& other) {
    if (other.counts_.size() > counts_.size()) {
        counts_.resize(other.counts_.size());
    }
    for (std::size_t actor = 0; actor < other.counts_.size(); ++actor) {
        counts_[actor] = std::max(counts_[actor], other.counts_[actor]);
    }
}

std::optional<Race> AccessHistory::record(AccessRange range, AccessKind kind, const Accessor& accessor,
                                          const VectorClock& known) {
    std::optional<Race> race;
    if (range.begin == range.end) {
        return race;
    }
    const auto look_at = [&](const Accessor& earlier, AccessKind earlier_kind, AccessRange where) {
        const bool is_between_hosts = kind == AccessKind::release && earlier.is_host;
        if (!race && !is_between_hosts && !happened_before(earlier, known)) {
            race = Race{earlier, earlier_kind, where};
        }
    };
    split_at(range.begin);
    split_at(range.end);
    fill_gaps(range);
    for (auto cell = cells_.lower_bound(range.begin); cell != cells_.end() && cell->first < range.end; ++cell) {
        auto& [end, write, reads] = cell->second;
        const AccessRange where{cell->first, end};
        if (write) {
            look_at(*write, AccessKind::write, where);
        }
        if (kind == AccessKind::read) {
            std::erase_if(reads, [&](const Accessor& earlier) { return happened_before(earlier, known); });
            reads.push_back(accessor);
            continue;
        }
        for (const Accessor& earlier : reads) {
            look_at(earlier, AccessKind::read, where);
        }
        if (kind == AccessKind::write) {
            reads.clear();
            write = accessor;
        }
    }
    return race;
}

void AccessHistory::forget(AccessRange range) {
    if (range.begin == range.end) {
        return;
    }
    split_at(range.begin);
    split_at(range.end);
    cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
}

void AccessHistory::split_at(std::uint64_t address) {
    auto cell = cells_.lower_bound(address);
    if (cell == cells_.begin()) {
        return;
    }
    cell = std::prev(cell);
    if (cell->second.end > address) {
        Cell behind = cell->second;
        cell->second.end = address;
        cells_.emplace(address, std::move(behind));
    }
}

void AccessHistory::fill_gaps(AccessRange range) {
    std::uint64_t at = range.begin;
    auto cell = cells_.lower_bound(at);
    while (at < range.end) {
        const std::uint64_t gap_end = cell == cells_.end() ? range.end : std::min(cell->first, range.end);
        if (at < gap_end) {
            cells_.emplace_hint(cell, at, Cell{gap_end, {}, {}});
        }
        if (cell == cells_.end() || cell->first >= range.end) {
            return;
        }
        at = cell->second.end;
        ++cell;
    }
}

}  // namespace kvo::fake
