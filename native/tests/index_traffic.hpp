// A writer that changes an index without end, and what its readers may see meanwhile.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "index/lookup.hpp"
#include "index_fixture.hpp"

namespace kvo::test {

// Keys of three kinds: those that are there all the time, those that come and go, and those that are never there.
struct KeyKinds {
    std::vector<Key> lasting;
    std::vector<Key> passing;
    std::vector<Key> absent;
};

// Many chains, and growth from the first buckets on.
inline KeyKinds make_scattered(std::size_t lasting, std::size_t passing) {
    KeyKinds kinds;
    for (std::uint64_t number = 0; number < lasting + passing + 500; ++number) {
        auto& keys = number < lasting ? kinds.lasting : number < lasting + passing ? kinds.passing : kinds.absent;
        keys.push_back(make_key(number));
    }
    return kinds;
}

// Few chains and long ones: of the keys of one bucket of a new table.
inline KeyKinds make_crowded(std::size_t lasting, std::size_t passing, unsigned bits) {
    std::vector<Key> keys = make_colliding_keys(lasting + passing + 30, 0, bits);
    const auto at = [&](std::size_t index) { return keys.begin() + static_cast<std::ptrdiff_t>(index); };
    return {{at(0), at(lasting)}, {at(lasting), at(lasting + passing)}, {at(lasting + passing), keys.end()}};
}

// Changes the index without end. Lasting entries move from slot to slot, passing ones come and go in waves, so that
// numbers, places and buckets are used again and again.
class Writer {
public:
    Writer(IndexFixture& index, const KeyKinds& keys) : index_(index), keys_(keys), passing_(keys.passing.size()) {
        // The lasting ones are spread over their chains, between such as will go.
        std::size_t next = 0;
        for (const Key& key : keys.lasting) {
            lasting_.push_back(add(key));
            for (std::size_t i = 0; next < passing_.size() && i < passing_.size() / keys.lasting.size(); ++i, ++next) {
                passing_[next] = next % 3 == 0 ? add(keys.passing[next]) : kNoEntry;
            }
        }
        std::fill(passing_.begin() + static_cast<std::ptrdiff_t>(next), passing_.end(), kNoEntry);
    }

    void change(std::uint64_t step) {
        const std::size_t moving = random_() % lasting_.size();
        index_.move(lasting_[moving], keys_.lasting[moving]);
        const std::size_t at = random_() % passing_.size();
        const bool is_rising = step / (passing_.size() + 1) % 2 == 0;
        if (passing_[at] == kNoEntry) {
            if (is_rising || random_() % 4 == 0) {
                passing_[at] = add(keys_.passing[at]);
            }
        } else if (!is_rising || random_() % 4 == 0) {
            index_.remove(passing_[at]);
            passing_[at] = kNoEntry;
        }
    }

private:
    EntryNumber add(const Key& key) {
        const EntryNumber number = index_.add(key);
        CHECK(number != kNoEntry);
        return number;
    }

    IndexFixture& index_;
    const KeyKinds& keys_;
    std::vector<EntryNumber> lasting_;
    std::vector<EntryNumber> passing_;
    std::mt19937_64 random_{11};
};

// Whether an entry that was found is whole: its fields are those of the generation in which it was found.
inline bool is_whole(const IndexView& view, const Key& key, const Found& found) {
    const Entry& entry = view.entries[found.entry];
    if (!found.word.is_readable() && found.word.state() != EntryState::moving) {
        return false;
    }
    const std::uint64_t slot = entry.slot.load(std::memory_order_acquire);
    const std::uint32_t parent = entry.parent.load(std::memory_order_acquire);
    HashWords hash;
    for (std::size_t i = 0; i < hash.size(); ++i) {
        hash[i] = entry.hash[i].load(std::memory_order_acquire);
    }
    const bool is_of_key =
        entry.space.load(std::memory_order_acquire) == key.space && hash == key.hash && parent == expected_parent(key);
    const EntryWord after(entry.word.load(std::memory_order_relaxed));
    if (after.generation() != found.word.generation()) {
        return true;  // another one by now, and the reader can tell
    }
    const bool may_move = !found.word.is_readable() || !after.is_readable();
    return is_of_key && (may_move || slot == expected_slot(key, after.generation()));
}

enum Verdict : int { kGood = 0, kMissed = 1, kTorn = 2, kInvented = 3 };

// One pass over all keys, one by one or in batches.
inline Verdict read_all(const IndexView& view, const KeyKinds& keys, bool in_batches) {
    std::vector<Found> found;
    const auto look_up = [&](const std::vector<Key>& wanted) {
        found.assign(wanted.size(), Found{});
        if (in_batches) {
            find_entries(view, wanted.front().space, pack_hashes(wanted), 1, found);
            return;
        }
        std::ranges::transform(wanted, found.begin(), [&](const Key& key) { return find_entry(view, key); });
    };
    look_up(keys.lasting);
    for (std::size_t i = 0; i < found.size(); ++i) {
        if (found[i].entry == kNoEntry) {
            return kMissed;
        }
        if (!is_whole(view, keys.lasting[i], found[i])) {
            return kTorn;
        }
    }
    look_up(keys.passing);
    for (std::size_t i = 0; i < found.size(); ++i) {
        if (found[i].entry != kNoEntry && !is_whole(view, keys.passing[i], found[i])) {
            return kTorn;
        }
    }
    look_up(keys.absent);
    return std::ranges::all_of(found, [](const Found& one) { return one.entry == kNoEntry; }) ? kGood : kInvented;
}

}  // namespace kvo::test
