// A model of all kinds of groups in a small cache, and what its leases and digests must be.
#pragma once

#include "cache_fixture.hpp"

namespace kvo::test {

// Prompts of multiples of 64 tokens, in all groups of `hybrid_geometry`.
struct Hybrid {
    explicit Hybrid(CacheOptions options = small_options()) : cache(std::move(options)) {
        name_space = namespace_of(cache.open(hybrid_geometry()));
        session = cache.session();
    }
    Space space(std::uint32_t group) const { return make_space(name_space, group); }
    // A group's keys: the hash of each block's last tokens.
    Hashes keys(std::uint32_t group, std::uint64_t prompt, std::uint64_t first, std::uint64_t end) {
        const std::size_t stride = cache.group(space(group)).block_size / 16;
        Hashes keys;
        for (std::uint64_t block = first; block < end; ++block) {
            const Hashes last = chain(prompt, 1, (block + 1) * stride - 1);
            keys.insert(keys.end(), last.begin(), last.end());
        }
        return keys;
    }
    void put(std::uint32_t group, std::uint64_t prompt, std::uint64_t first, std::uint64_t end) {
        CHECK_EQUAL(cache.put(session, space(group), keys(group, prompt, first, end)), end - first);
    }
    void put_all(std::uint64_t prompt, std::uint64_t tokens) {
        for (std::uint32_t group = 0; group < 5; ++group) {
            put(group, prompt, 0, tokens / cache.group(space(group)).block_size);
        }
    }
    Acquired acquire(std::uint64_t prompt, std::size_t hashes, std::uint64_t local = 0, std::uint64_t limit = ~0ull,
                     std::uint64_t alignment = 1, Shards shards = {}) {
        const Hashes request = chain(prompt, hashes);
        return value_of(cache->leases().acquire(
            session,
            {.name_space = name_space, .chain = request, .local = local, .limit = limit, .alignment = alignment},
            shards));
    }
    // Checks that exactly the blocks that a load needs were leased, and that every byte is right.
    void check_hit(const Acquired& acquired, std::uint64_t prompt, std::uint64_t local, std::uint64_t boundary) {
        CHECK(acquired.outcome == AcquireOutcome::hit);
        CHECK_EQUAL(acquired.boundary, boundary);
        CHECK_EQUAL(acquired.groups.size(), 5u);
        for (std::uint32_t group = 0; group < 5; ++group) {
            const BlockRange range = needed_blocks(cache.group(space(group)), local, boundary);
            CHECK_EQUAL(acquired.groups[group].addresses.size(), range.count());
            if (range.count() != 0) {
                CHECK_EQUAL(acquired.groups[group].first, range.first);
                CHECK(cache.is_right(acquired, space(group), keys(group, prompt, range.first, range.end)));
            }
        }
    }

    SmallCache cache;
    std::uint32_t name_space = 0;
    SessionId session = 0;
};

// Computes the digest that a record must have.
inline std::uint64_t digest_by_hand(SmallCache& cache, Space space, std::uint64_t address,
                                    std::span<const std::uint8_t> hash, std::uint32_t shard) {
    const std::span<const std::byte> record = cache.record(space, address, shard);
    const Fingerprint name = fingerprint(1);
    return digest_record({reinterpret_cast<const std::uint8_t*>(record.data()), record.size()},
                         {name, hash.first<kHashBytes>(), group_of(space), shard});
}

}  // namespace kvo::test
