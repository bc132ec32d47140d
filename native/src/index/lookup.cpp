#include "index/lookup.hpp"

#include <algorithm>
#include <array>

namespace kvo {
namespace {

enum class Search : std::uint8_t { found, absent, changed };

// Whether the entry is readable and has this key; both as of one moment.
Search compare_entry(const Entry& entry, const Key& key, EntryWord& word) {
    word = EntryWord(entry.word.load(std::memory_order_acquire));
    if (!word.is_readable() && word.state() != EntryState::moving) {
        return Search::absent;
    }
    std::uint64_t difference = entry.space.load(std::memory_order_acquire) ^ key.space;
    for (std::size_t i = 0; i < key.hash.size(); ++i) {
        difference |= entry.hash[i].load(std::memory_order_acquire) ^ key.hash[i];
    }
    if (difference != 0) {
        return Search::absent;
    }
    // If the generation changed, the entry may still have this key, in another slot.
    const bool is_same = EntryWord(entry.word.load(std::memory_order_relaxed)).generation() == word.generation();
    return is_same ? Search::found : Search::changed;
}

Search search_chain(const IndexView& view, const Key& key, std::uint64_t mixed, Found& found) {
    const std::uint32_t count = view.header->bucket_count.load(std::memory_order_acquire);
    const std::uint32_t first = bucket_of(mixed, count);
    const std::uint32_t limit = view.header->bucket_limit;
    const std::uint32_t version = view.buckets[first].version.load(std::memory_order_acquire);
    const std::uint8_t tag = tag_of(mixed);
    // A chain that changes under our feet may lead anywhere, but not for ever: more buckets than exist are no chain.
    std::uint32_t number = first;
    for (std::uint32_t steps = 0; number < limit && steps < limit; ++steps) {
        const Bucket& bucket = view.buckets[number];
        for (std::uint32_t positions = match_bucket(bucket, tag); positions != 0; positions &= positions - 1) {
            const auto position = static_cast<std::size_t>(std::countr_zero(positions));
            const EntryNumber entry = bucket.entries[position].load(std::memory_order_acquire);
            if (entry >= view.header->entry_limit) {
                continue;
            }
            EntryWord word;
            const Search outcome = compare_entry(view.entries[entry], key, word);
            if (outcome == Search::found) {
                found = {entry, word};
            }
            if (outcome != Search::absent) {
                return outcome;
            }
        }
        number = bucket.overflow.load(std::memory_order_acquire);
        if ((steps & 15) == 15 && view.buckets[first].version.load(std::memory_order_acquire) != version) {
            return Search::changed;
        }
    }
    const bool is_stable = view.buckets[first].version.load(std::memory_order_acquire) == version &&
                           bucket_of(mixed, view.header->bucket_count.load(std::memory_order_acquire)) == first;
    return is_stable ? Search::absent : Search::changed;
}

Found find_mixed(const IndexView& view, const Key& key, std::uint64_t mixed) {
    // Each further search means that the writer changed this very chain, or moved this very entry, during the last one.
    constexpr int kSearches = 256;
    Found found;
    for (int i = 0; i < kSearches && search_chain(view, key, mixed, found) == Search::changed; ++i) {
    }
    return found;
}

// The first entry that the bucket's tags point to, its memory asked for; kNoEntry if there is none.
EntryNumber prefetch_candidate(const IndexView& view, std::uint32_t number, std::uint8_t tag) {
    const Bucket& bucket = view.buckets[number];
    const std::uint32_t positions = match_bucket(bucket, tag);
    if (positions == 0) {
        return kNoEntry;
    }
    const auto position = static_cast<std::size_t>(std::countr_zero(positions));
    const EntryNumber entry = bucket.entries[position % Bucket::kCapacity].load(std::memory_order_acquire);
    if (entry >= view.header->entry_limit) {
        return kNoEntry;
    }
    __builtin_prefetch(&view.entries[entry]);
    return entry;
}

}  // namespace

void prefetch_buckets(const IndexView& view, Space space, std::span<const std::uint8_t> hashes) {
    const std::uint32_t count = view.header->bucket_count.load(std::memory_order_acquire);
    for (std::size_t at = 0; at + kHashBytes <= hashes.size(); at += kHashBytes) {
        const std::uint64_t mixed = mix_key({read_hash(hashes.data() + at), space}, view.header->seed);
        __builtin_prefetch(&view.buckets[bucket_of(mixed, count)], 1);
    }
}

Found find_entry(const IndexView& view, const Key& key) {
    return find_mixed(view, key, mix_key(key, view.header->seed));
}

void find_entries(const IndexView& view, Space space, std::span<const std::uint8_t> hashes, std::size_t stride,
                  std::span<Found> found) {
    // The number of look-ups in flight: as many as the processor can prefetch without evicting their cache lines.
    constexpr std::size_t kAhead = 32;
    std::array<std::uint64_t, kAhead> mixed;
    std::array<EntryNumber, kAhead> candidates;
    const std::uint64_t seed = view.header->seed;
    const std::uint32_t limit = view.header->bucket_limit;
    const auto key_at = [&](std::size_t i) {
        return Key{read_hash(hashes.data() + ((i + 1) * stride - 1) * kHashBytes), space};
    };
    for (std::size_t begin = 0; begin < found.size(); begin += kAhead) {
        const std::size_t count = std::min(kAhead, found.size() - begin);
        const std::uint32_t buckets = view.header->bucket_count.load(std::memory_order_acquire);
        const auto overflow_of = [&](std::size_t i) {
            return view.buckets[bucket_of(mixed[i], buckets)].overflow.load(std::memory_order_acquire);
        };
        for (std::size_t i = 0; i < count; ++i) {
            mixed[i] = mix_key(key_at(begin + i), seed);
            __builtin_prefetch(&view.buckets[bucket_of(mixed[i], buckets)]);
        }
        for (std::size_t i = 0; i < count; ++i) {
            candidates[i] = prefetch_candidate(view, bucket_of(mixed[i], buckets), tag_of(mixed[i]));
            if (candidates[i] == kNoEntry && overflow_of(i) < limit) {
                __builtin_prefetch(&view.buckets[overflow_of(i)]);
            }
        }
        for (std::size_t i = 0; i < count; ++i) {
            if (candidates[i] != kNoEntry) {
                continue;
            }
            if (const std::uint32_t next = overflow_of(i); next < limit) {
                candidates[i] = prefetch_candidate(view, next, tag_of(mixed[i]));
            }
        }
        for (std::size_t i = 0; i < count; ++i) {
            const Key key = key_at(begin + i);
            Found& one = found[begin + i];
            one.entry = candidates[i];
            // However it was come by, an entry that has the key is the one.
            if (one.entry == kNoEntry || compare_entry(view.entries[one.entry], key, one.word) != Search::found) {
                one = find_mixed(view, key, mixed[i]);
            }
        }
    }
}

}  // namespace kvo
