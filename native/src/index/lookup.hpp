// Finding entries by their keys, without a lock and from any process that has the index mapped.
#pragma once

#include <bit>
#include <cstring>
#include <span>

#include "index/index_view.hpp"

namespace kvo {

struct Key {
    HashWords hash;
    Space space;
};

inline HashWords read_hash(const std::uint8_t* bytes) {
    HashWords words;
    std::memcpy(words.data(), bytes, kHashBytes);
    return words;
}

// 64 well-mixed bits of a key. The seed is the index's own and is part of each factor, so that a client cannot choose
// words that cancel the others, or keys that share a bucket. A process that has the index mapped knows the seed and
// can; the table refuses such keys (table.hpp).
inline std::uint64_t mix_key(const Key& key, std::uint64_t seed) {
    const auto fold = [](std::uint64_t left, std::uint64_t right) {
        __extension__ using Wide = unsigned __int128;
        const Wide product = static_cast<Wide>(left) * right;
        return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    };
    const std::uint64_t first = fold(key.hash[0] ^ seed, key.hash[1] ^ std::rotl(seed, 29) ^ 0x9e3779b97f4a7c15);
    const std::uint64_t second = fold(key.hash[2] ^ std::rotl(seed, 43) ^ (static_cast<std::uint64_t>(key.space) << 32),
                                      key.hash[3] ^ std::rotl(seed, 11) ^ 0xd1b54a32d192ed03);
    return fold(first ^ std::rotl(seed, 17), second ^ 0x8bb84b93962eacc9);
}

// Linear hashing: of `count` buckets, the ones below the split point have been split already.
inline std::uint32_t bucket_of(std::uint64_t mixed, std::uint32_t count) {
    const std::uint32_t mask = std::bit_ceil(count) - 1;
    const std::uint32_t number = static_cast<std::uint32_t>(mixed) & mask;
    return number < count ? number : number & (mask >> 1);
}

inline std::uint8_t tag_of(std::uint64_t mixed) {
    const auto tag = static_cast<std::uint8_t>(mixed >> 56);
    return tag == 0 ? 1 : tag;
}

// One bit for every byte of `tags` that may equal `tag`: each equal one, and rarely one above it.
inline std::uint32_t match_tags(std::uint64_t tags, std::uint8_t tag) {
    constexpr std::uint64_t kEachByte = 0x0101010101010101;
    const std::uint64_t difference = tags ^ (kEachByte * tag);
    const std::uint64_t high_bits = (difference - kEachByte) & ~difference & (kEachByte << 7);
    return static_cast<std::uint32_t>((high_bits * 0x0002040810204081) >> 56);
}

// The positions of one bucket whose tag may be `tag`, one bit each.
inline std::uint32_t match_bucket(const Bucket& bucket, std::uint8_t tag) {
    const std::uint32_t low = match_tags(bucket.low_tags.load(std::memory_order_acquire), tag);
    const std::uint32_t high = match_tags(bucket.high_tags.load(std::memory_order_acquire), tag);
    return low | ((high & 7) << 8);
}

struct Found {
    EntryNumber entry = kNoEntry;
    EntryWord word;  // as it was when the key was compared
};

// Asks for the memory where look-ups and insertions of these keys begin, `hashes` being 32 bytes each.
void prefetch_buckets(const IndexView& view, Space space, std::span<const std::uint8_t> hashes);

// Returns the readable entry with this key, never a torn one. An entry that is there during the whole call is found,
// unless its chain changed during each of 256 searches, or a new server is refilling the table.
Found find_entry(const IndexView& view, const Key& key);

// The same for many keys of one space, `hashes` being 32 bytes each, `stride` hashes apart. Faster than one by one:
// memory is asked for in advance. `found[i]` belongs to hash number (i + 1) * stride - 1.
void find_entries(const IndexView& view, Space space, std::span<const std::uint8_t> hashes, std::size_t stride,
                  std::span<Found> found);

}  // namespace kvo
