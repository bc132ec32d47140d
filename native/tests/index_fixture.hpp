// An index whose entries are put in, moved and taken out in the order in which the cache changes their words.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "index/index_file.hpp"
#include "index/table.hpp"

namespace kvo::test {

constexpr std::uint64_t kSeed = 0x5eed;

inline std::uint64_t scramble(std::uint64_t number) {
    number = (number ^ (number >> 31)) * 0xbf58476d1ce4e5b9;
    number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
    return number ^ (number >> 31);
}

inline Key make_key(std::uint64_t number, Space space = make_space(3, 1)) {
    Key key{{}, space};
    for (std::size_t i = 0; i < key.hash.size(); ++i) {
        key.hash[i] = scramble(number * 4 + i + 1);
    }
    return key;
}

// Keys that fall into bucket `low` as long as a table has at most 2^bits buckets. `part` chooses among many such sets.
inline std::vector<Key> make_colliding_keys(std::size_t count, std::uint32_t low, unsigned bits,
                                            std::uint64_t part = 0) {
    std::vector<Key> keys;
    for (std::uint64_t number = (part + 1) << 40; keys.size() < count; ++number) {
        if (const Key key = make_key(number); (mix_key(key, kSeed) & ((1ull << bits) - 1)) == low) {
            keys.push_back(key);
        }
    }
    return keys;
}

inline std::vector<std::uint8_t> pack_hashes(const std::vector<Key>& keys) {
    std::vector<std::uint8_t> bytes(keys.size() * kHashBytes);
    for (std::size_t i = 0; i < keys.size(); ++i) {
        std::memcpy(bytes.data() + i * kHashBytes, keys[i].hash.data(), kHashBytes);
    }
    return bytes;
}

template <typename T>
T take(Result<T> result) {
    if (!result.ok()) {
        throw std::runtime_error(result.fault().message());
    }
    return std::move(result.value());
}

// Expected fields of an entry that is readable in this generation.
inline std::uint64_t expected_slot(const Key& key, std::uint32_t generation) {
    return scramble(key.hash[0] ^ (std::uint64_t{generation} << 20));
}
inline std::uint32_t expected_parent(const Key& key) { return static_cast<std::uint32_t>(scramble(key.hash[1])); }

class IndexFixture {
public:
    explicit IndexFixture(EntryNumber entry_limit)
        : file_(take(IndexFile::create({.entry_limit = entry_limit, .segment_bytes = 1 << 20, .extent_bytes = 1 << 12},
                                       kSeed))),
          table_(file_.view(), [this](const Region& region, std::uint64_t count) { return reserve(region, count); }) {
        if (Status status = table_.reset(); !status.ok()) {
            throw std::runtime_error(status.message());
        }
    }
    IndexFixture(const IndexFixture&) = delete;
    IndexFixture& operator=(const IndexFixture&) = delete;

    const IndexView& view() const { return file_.view(); }
    const IndexFile& file() const { return file_; }
    Table& table() { return table_; }
    const Table& table() const { return table_; }
    std::uint32_t bucket_count() const { return view().header->bucket_count.load(); }
    std::uint64_t overflow_used() const { return overflow_used_; }

    // The index gets no more memory for this region after this call.
    void refuse(const Region& region) { refused_offset_ = region.offset; }
    void refuse_nothing() { refused_offset_ = 0; }

    // A readable entry with this key; kNoEntry if the table refused it.
    EntryNumber add(const Key& key) {
        const EntryNumber number = take_number();
        Entry& entry = view().entries[number];
        const EntryWord reserved = word(number).next(EntryState::reserved);
        const std::uint32_t generation = reserved.generation() + 1;
        entry.slot.store(expected_slot(key, generation), std::memory_order_release);
        entry.space.store(key.space, std::memory_order_release);
        entry.parent.store(expected_parent(key), std::memory_order_release);
        entry.word.store(reserved.bits(), std::memory_order_release);
        for (std::size_t i = 0; i < key.hash.size(); ++i) {
            entry.hash[i].store(key.hash[i], std::memory_order_release);
        }
        if (!table_.insert(number).ok()) {
            entry.word.store(reserved.next(EntryState::free).bits(), std::memory_order_release);
            free_.push_back(number);
            return kNoEntry;
        }
        entry.word.store(reserved.next(EntryState::readable).bits(), std::memory_order_release);
        return number;
    }

    void remove(EntryNumber number) {
        Entry& entry = view().entries[number];
        entry.word.store(word(number).next(EntryState::free).bits(), std::memory_order_release);
        table_.erase(number);
        entry.space.store(kNoEntry, std::memory_order_release);  // while free it is a link
        free_.push_back(number);
    }

    // The record moves to another slot; the entry stays readable all the time.
    void move(EntryNumber number, const Key& key) {
        Entry& entry = view().entries[number];
        const EntryWord now = word(number);
        entry.word.store(now.with_state(EntryState::moving).bits(), std::memory_order_release);
        entry.slot.store(expected_slot(key, now.generation() + 1), std::memory_order_release);
        entry.word.store(now.next(EntryState::readable).bits(), std::memory_order_release);
    }

    EntryWord word(EntryNumber number) const { return EntryWord(view().entries[number].word.load()); }

    // In a forked child, which has not inherited the mapping: the same file again, where the parent has it.
    void map_again() const {
        void* const start = view().header;
        if (mmap(start, file_.segment().size_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                 file_.segment().file(), 0) != start) {
            throw std::runtime_error("the index cannot be mapped again");
        }
    }

private:
    Status reserve(const Region& region, std::uint64_t count) {
        if (region.offset == refused_offset_) {
            return {Code::unavailable, "no memory"};
        }
        if (region.offset == view().regions.overflow.offset) {
            overflow_used_ = std::max(overflow_used_, count);
        }
        return file_.ensure(region, count);
    }

    EntryNumber take_number() {
        if (!free_.empty()) {
            const EntryNumber number = free_.back();
            free_.pop_back();
            return number;
        }
        std::atomic<std::uint32_t>& count = view().header->entry_count;
        const EntryNumber number = count.load();
        if (Status status = file_.ensure(view().regions.entries, number + 1); !status.ok()) {
            throw std::runtime_error(status.message());
        }
        count.store(number + 1);
        return number;
    }

    IndexFile file_;
    std::uint64_t refused_offset_ = 0;

    std::uint64_t overflow_used_ = 0;
    Table table_;
    std::vector<EntryNumber> free_;
};

}  // namespace kvo::test
