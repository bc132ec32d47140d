// Drives a policy and a plain model of it side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "evict/eviction_policy.hpp"

namespace kvo::test {

// Entries by letter, each of one byte and with its letter as its name.
inline Admission admission(char entry, char parent = 0, std::uint64_t size_bytes = 1) {
    Admission made;
    made.entry = static_cast<EntryNumber>(entry - 'a');
    made.parent = parent == 0 ? kNoEntry : static_cast<EntryNumber>(parent - 'a');
    made.name = static_cast<std::uint64_t>(entry);
    made.size_bytes = size_bytes;
    return made;
}

inline void touch(EvictionPolicy& policy, const std::string& letters) {
    std::vector<EntryNumber> entries;
    for (const char letter : letters) {
        entries.push_back(static_cast<EntryNumber>(letter - 'a'));
    }
    policy.touch(entries);
}

inline std::string evict(EvictionPolicy& policy, std::size_t count) {
    std::string order;
    for (; count > 0; --count) {
        const EntryNumber victim = policy.choose_victim();
        if (victim == kNoEntry) {
            break;
        }
        order += static_cast<char>('a' + victim);
        policy.remove(victim, true);
    }
    return order;
}

// So many entries, all of which there are.
inline std::vector<EntryNumber> evict_some(EvictionPolicy& policy, std::size_t count) {
    std::vector<EntryNumber> victims;
    for (; count > 0; --count) {
        victims.push_back(policy.choose_victim());
        CHECK(victims.back() != kNoEntry);
        policy.remove(victims.back(), true);
    }
    return victims;
}

// Requests are ways from the root of a tree of records to one of them; sizes differ; some entries vanish by themselves.
class PairDriver {
public:
    static constexpr std::size_t kRecords = 120;

    PairDriver(EvictionPolicy& policy, EvictionPolicy& model, std::uint64_t capacity_bytes, unsigned seed)
        : policy_(policy), model_(model), capacity_bytes_(capacity_bytes), random_(seed) {
        for (EntryNumber entry = kRecords; entry-- > 0;) {
            free_.push_back(entry);
        }
    }

    void run(int steps) {
        for (int step = 0; step < steps; ++step) {
            if (random_() % 16 == 0) {
                lose(random_() % kRecords);
            } else {
                // Most requests are for the low numbers.
                request(std::min(random_() % kRecords, random_() % kRecords));
            }
            CHECK(used_bytes_ <= capacity_bytes_);
        }
        CHECK(evictions_ > steps / 2);
        while (used_bytes_ > 0) {
            evict_one({});
        }
        CHECK_EQUAL(choose(), kNoEntry);
    }

private:
    static std::uint64_t size_of(std::size_t record) { return 1 + record % 7 * (record % 3); }

    EntryNumber choose() {
        const EntryNumber chosen = policy_.choose_victim();
        CHECK_EQUAL(chosen, model_.choose_victim());
        CHECK_EQUAL(chosen, policy_.choose_victim());
        return chosen;
    }

    void remove(std::size_t record, bool was_evicted) {
        const EntryNumber entry = entries_[record];
        policy_.remove(entry, was_evicted);
        model_.remove(entry, was_evicted);
        entries_[record] = kNoEntry;
        free_.push_back(entry);
        used_bytes_ -= size_of(record);
    }

    void lose(std::size_t record) {
        if (entries_[record] != kNoEntry) {
            remove(record, false);
        }
    }

    bool evict_one(const std::vector<EntryNumber>& leased) {
        for (std::size_t tries = 0; tries <= 2 * kRecords; ++tries) {
            const EntryNumber victim = choose();
            CHECK(victim != kNoEntry);
            if (std::ranges::find(leased, victim) == leased.end()) {
                remove(static_cast<std::size_t>(std::ranges::find(entries_, victim) - entries_.begin()), true);
                evictions_ += 1;
                return true;
            }
            policy_.keep(victim);
            model_.keep(victim);
        }
        return false;
    }

    void request(std::size_t record) {
        std::vector<std::size_t> path{record};
        while (path.back() != 0) {
            path.push_back((path.back() - 1) / 2);
        }
        std::ranges::reverse(path);
        std::vector<EntryNumber> leased;
        std::uint64_t leased_bytes = 0;
        std::size_t at = 0;
        for (; at < path.size() && entries_[path[at]] != kNoEntry; ++at) {
            leased.push_back(entries_[path[at]]);
            leased_bytes += size_of(path[at]);
        }
        policy_.touch(leased);
        model_.touch(leased);
        for (; at < path.size() && leased_bytes + size_of(path[at]) <= capacity_bytes_; ++at) {
            if (entries_[path[at]] != kNoEntry) {
                continue;
            }
            while (used_bytes_ + size_of(path[at]) > capacity_bytes_) {
                CHECK(evict_one(leased));
            }
            admit(path[at]);
        }
    }

    void admit(std::size_t record) {
        Admission made;
        made.entry = entries_[record] = free_.back();
        free_.pop_back();
        made.parent = record == 0 ? kNoEntry : entries_[(record - 1) / 2];
        made.name = record * 0x9e3779b97f4a7c15;
        made.size_bytes = size_of(record);
        used_bytes_ += made.size_bytes;
        policy_.admit(made);
        model_.admit(made);
    }

    EvictionPolicy& policy_;
    EvictionPolicy& model_;
    std::uint64_t capacity_bytes_;
    std::mt19937 random_;
    std::vector<EntryNumber> entries_ = std::vector<EntryNumber>(kRecords, kNoEntry);  // by record
    std::vector<EntryNumber> free_;
    std::uint64_t used_bytes_ = 0;
    int evictions_ = 0;
};

// An entry as policy models know it. Models keep queues of such plain facts, newest first, and search them from end to
// end.
struct ModelEntry {
    EntryNumber entry = kNoEntry;
    std::uint64_t name = 0;
    std::uint64_t size_bytes = 0;
    int uses = 0;
};

using ModelQueue = std::vector<ModelEntry>;

inline ModelQueue::iterator find(ModelQueue& queue, EntryNumber entry) {
    return std::ranges::find(queue, entry, &ModelEntry::entry);
}

inline bool holds(ModelQueue& queue, EntryNumber entry) { return find(queue, entry) != queue.end(); }

inline ModelEntry take(ModelQueue& queue, EntryNumber entry) {
    const auto found = find(queue, entry);
    const ModelEntry taken = *found;
    queue.erase(found);
    return taken;
}

inline void put_newest(ModelQueue& queue, ModelEntry entry) { queue.insert(queue.begin(), entry); }

// Next older than its parent where that is in the same queue.
inline void put_behind(ModelQueue& queue, const Admission& admission) {
    const auto parent = find(queue, admission.parent);
    queue.insert(parent == queue.end() ? queue.begin() : parent + 1,
                 {admission.entry, admission.name, admission.size_bytes});
}

inline std::uint64_t bytes(const ModelQueue& queue) {
    std::uint64_t sum = 0;
    for (const ModelEntry& entry : queue) {
        sum += entry.size_bytes;
    }
    return sum;
}

inline EntryNumber oldest(const ModelQueue& queue) { return queue.empty() ? kNoEntry : queue.back().entry; }

}  // namespace kvo::test
