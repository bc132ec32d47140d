// A pool under load: records of several sizes come and go while the pool is full.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "arena/arena.hpp"
#include "bench/turnover_load.hpp"

namespace kvo::test {

// The victims' order; a ring without an end, entry 0 between the newest and the oldest.
class EntryRing {
public:
    EntryRing() : links_(1) {}

    void append(EntryNumber entry) {
        links_.resize(std::max(links_.size(), std::size_t{entry} + 1));
        const EntryNumber newest = links_[0].previous;
        links_[entry] = {newest, 0};
        links_[newest].next = entry;
        links_[0].previous = entry;
    }

    void remove(EntryNumber entry) {
        const auto [previous, next] = links_[entry];
        links_[previous].next = next;
        links_[next].previous = previous;
    }

    EntryNumber oldest() const { return links_[0].next; }

private:
    struct Links {
        EntryNumber previous = 0;
        EntryNumber next = 0;
    };
    std::vector<Links> links_;
};

enum class Victims { oldest, least_recent, random };

// Allocates, moves and evicts in an arena as a cache does, without the cache.
class ArenaLoad {
public:
    struct Counts {
        std::uint64_t offered_bytes = 0;
        std::uint64_t allocated_bytes = 0;
        std::uint64_t evicted_bytes = 0;
        std::uint64_t moved_bytes = 0;
        std::uint64_t plans = 0;
        std::uint64_t refused_plans = 0;
        std::uint64_t refused_records = 0;
    };

    ArenaLoad(Arena& arena, Victims victims, std::uint64_t seed)
        : arena_(arena), victims_(victims), random_(seed), entries_(1) {}

    // False: there is no room and too much would have to be evicted, or all that is left is pinned.
    bool add_record(std::uint64_t record_bytes) {
        const ClassNumber number = arena_.class_for(record_bytes).value();
        // Holes that no plan touches may be one slot in 64.
        const std::uint64_t evicted_limit =
            counts_.evicted_bytes + arena_.stats().capacity_bytes / 32 + 4 * record_bytes;
        counts_.offered_bytes += record_bytes;
        for (;;) {
            const EntryNumber entry = unused_entry();
            if (const auto slot = arena_.allocate(number, entry)) {
                admit(entry, *slot, record_bytes);
                return true;
            }
            if (!make_room(number) && (counts_.evicted_bytes >= evicted_limit || !evict_one())) {
                ++counts_.refused_records;
                return false;
            }
        }
    }

    // Offers records until they are as many bytes as `turnovers` pools.
    void run(RecordMix& mix, double turnovers, UsageMeter* meter = nullptr) {
        const std::uint64_t capacity = arena_.stats().capacity_bytes;
        const auto bytes = static_cast<std::uint64_t>(turnovers * static_cast<double>(capacity));
        const std::uint64_t end = counts_.offered_bytes + bytes;
        while (counts_.offered_bytes < end) {
            add_record(mix.draw(random_));
            if (meter != nullptr) {
                meter->see(live_bytes_, capacity);
            }
        }
    }

    // Pins a share of the records there are, and no others.
    void pin(double share) {
        std::bernoulli_distribution is_chosen(share);
        for (Entry& entry : entries_) {
            entry.is_pinned = entry.record_bytes != 0 && is_chosen(random_);
        }
    }

    void evict_all() {
        while (evict_one()) {
        }
    }

    const Counts& counts() const { return counts_; }
    std::uint64_t live_bytes() const { return live_bytes_; }

private:
    struct Entry {
        Slot slot;
        std::uint64_t record_bytes = 0;  // 0: unused
        bool is_pinned = false;
    };

    EntryNumber unused_entry() {
        if (unused_.empty()) {
            unused_.push_back(static_cast<EntryNumber>(entries_.size()));
            entries_.emplace_back();
        }
        return unused_.back();
    }

    void admit(EntryNumber entry, Slot slot, std::uint64_t record_bytes) {
        unused_.pop_back();
        entries_[entry] = {slot, record_bytes, false};
        order_.append(entry);
        live_bytes_ += record_bytes;
        counts_.allocated_bytes += record_bytes;
        if (victims_ == Victims::least_recent) {
            touch(draw_entry());
        }
    }

    EntryNumber draw_entry() { return static_cast<EntryNumber>(random_() % entries_.size()); }

    void touch(EntryNumber entry) {
        if (entries_[entry].record_bytes != 0) {
            order_.remove(entry);
            order_.append(entry);
        }
    }

    EntryNumber choose_victim() {
        const auto is_victim = [&](EntryNumber entry) {
            return entries_[entry].record_bytes != 0 && !entries_[entry].is_pinned;
        };
        for (int tries = 0; victims_ == Victims::random && tries < 64; ++tries) {
            if (const EntryNumber entry = draw_entry(); is_victim(entry)) {
                return entry;
            }
        }
        EntryNumber oldest = order_.oldest();
        for (std::size_t tries = entries_.size(); tries != 0 && oldest != 0 && !is_victim(oldest); --tries) {
            touch(oldest);
            oldest = order_.oldest();
        }
        return is_victim(oldest) ? oldest : kNoEntry;
    }

    bool evict_one() {
        const EntryNumber victim = choose_victim();
        if (victim == kNoEntry) {
            return false;
        }
        Entry& entry = entries_[victim];
        arena_.free(entry.slot);
        order_.remove(victim);
        live_bytes_ -= entry.record_bytes;
        counts_.evicted_bytes += entry.record_bytes;
        entry.record_bytes = 0;
        unused_.push_back(victim);
        return true;
    }

    bool make_room(ClassNumber number) {
        if (!arena_.can_make_room(number)) {
            return false;
        }
        const auto plan = arena_.plan_room(number, [&](EntryNumber entry) { return !entries_[entry].is_pinned; });
        if (!plan) {
            ++counts_.refused_plans;
            return false;
        }
        ++counts_.plans;
        for (const Move& move : plan->moves) {
            Entry& entry = entries_[move.owner];
            entry.slot = move.to;
            counts_.moved_bytes += entry.record_bytes;
            arena_.finish_move(move);
        }
        return true;
    }

    Arena& arena_;
    Victims victims_;
    std::mt19937_64 random_;
    std::vector<Entry> entries_;  // 0 is no entry
    std::vector<EntryNumber> unused_;
    EntryRing order_;
    std::uint64_t live_bytes_ = 0;
    Counts counts_;
};

}  // namespace kvo::test
