// The digests of entries' records: how they are made, where they stand, and whether the bytes are still those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cache/cache_state.hpp"
#include "digest/digest.hpp"

namespace kvo {

// Returns the digest of one shard's record of the block with this hash.
std::uint64_t make_digest(const Namespace& name_space, Space space, std::span<const std::uint8_t, kHashBytes> hash,
                          std::uint32_t shard, std::span<const std::byte> record);

// The digest in the index, or kNoDigest if the group has no such shard. The caller has a lease, a reservation or the
// writer's lock; the same holds for the functions below.
std::uint64_t digest_of(const IndexView& view, EntryNumber entry, std::uint32_t shard, const Namespace& name_space);
void set_digest(const IndexView& view, EntryNumber entry, std::uint32_t shard, const Namespace& name_space,
                std::uint64_t digest);

// Reads an entry's records and compares them with their digests.
bool verify_entry(const CacheState& state, EntryNumber entry);

}  // namespace kvo
