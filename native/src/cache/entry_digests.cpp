#include "cache/entry_digests.hpp"

#include <array>
#include <bit>

namespace kvo {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

std::uint64_t make_digest(const Namespace& name_space, Space space, std::span<const std::uint8_t, kHashBytes> hash,
                          std::uint32_t shard, std::span<const std::byte> record) {
    const RecordName name{name_space.fingerprint, hash, group_of(space), shard};
    return digest_record({reinterpret_cast<const std::uint8_t*>(record.data()), record.size()}, name);
}

std::uint64_t digest_of(const IndexView& view, EntryNumber entry, std::uint32_t shard, const Namespace& name_space) {
    const Space space = view.entries[entry].space.load(kRelaxed);
    const std::uint32_t shards = name_space.geometry.groups[group_of(space)].shards;
    if (shard >= shards) {
        return kNoDigest;
    }
    return shards == 1 ? view.digests[entry].digest.load(kRelaxed)
                       : view.shard_digests[entry].digest[shard].load(kRelaxed);
}

void set_digest(const IndexView& view, EntryNumber entry, std::uint32_t shard, const Namespace& name_space,
                std::uint64_t digest) {
    const Space space = view.entries[entry].space.load(kRelaxed);
    if (name_space.geometry.groups[group_of(space)].shards == 1) {
        view.digests[entry].digest.store(digest, std::memory_order_release);
    } else {
        view.shard_digests[entry].digest[shard].store(digest, std::memory_order_release);
    }
}

bool verify_entry(const CacheState& state, EntryNumber number) {
    const Entry& entry = state.view.entries[number];
    const Space space = entry.space.load(kRelaxed);
    const Namespace& name_space = *state.namespaces.find(namespace_of(space));
    const std::uint64_t record_bytes = name_space.geometry.groups[group_of(space)].record_bytes;
    const std::span<const std::byte> slot = state.store.slot_bytes(number);
    const auto hash = std::bit_cast<std::array<std::uint8_t, kHashBytes>>(hash_of(entry));
    for (std::uint32_t shard = 0; shard < name_space.geometry.groups[group_of(space)].shards; ++shard) {
        const auto record = slot.subspan(shard * record_bytes, record_bytes);
        if (make_digest(name_space, space, hash, shard, record) != digest_of(state.view, number, shard, name_space)) {
            return false;
        }
    }
    return true;
}

}  // namespace kvo
