// Reserving, committing, aborting, and everything else that changes which entries there are: under the writer's lock,
// in parts short enough for others to get in between.
#include <algorithm>
#include <array>

#include "cache/cache_core.hpp"
#include "cache/entry_digests.hpp"
#include "index/lookup.hpp"

namespace kvo {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

std::size_t CacheCore::invalidate(Space space, std::span<const std::uint8_t> hashes) {
    std::size_t removed = 0;
    const std::size_t count = hashes.size() / kHashBytes;
    for (std::size_t begin = 0; begin < count; begin += CacheState::kPart) {
        const std::lock_guard lock(state_.writer);
        removed += invalidate_part(
            space, hashes.subspan(begin * kHashBytes, std::min(CacheState::kPart, count - begin) * kHashBytes));
    }
    return removed;
}

std::size_t CacheCore::invalidate_part(Space space, std::span<const std::uint8_t> hashes) {
    std::size_t removed = 0;
    for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
        const EntryNumber entry = find_entry(state_.view, {read_hash(hashes.data() + at), space}).entry;
        removed += entry != kNoEntry && state_.store.remove(entry, Leaving::untrusted);
    }
    return removed;
}

std::uint64_t CacheCore::evict(std::uint64_t bytes) {
    const auto used = [this] { return state_.store.counts().used_bytes.load(kRelaxed); };
    bytes = std::min(bytes, memory_->capacity_bytes());
    std::uint64_t evicted = 0;
    for (bool is_more = true; is_more && evicted < bytes;) {
        const std::lock_guard lock(state_.writer);
        state_.drain_touches();
        const std::uint64_t before = used();
        for (std::size_t i = 0; i < CacheState::kPart && is_more && evicted + before - used() < bytes; ++i) {
            is_more = state_.store.evict_one();
        }
        evicted += before - used();
    }
    return evicted;
}

std::size_t CacheCore::clear(std::uint32_t name_space) {
    std::size_t removed = 0;
    const EntryNumber count = state_.view.header->entry_count.load(std::memory_order_acquire);
    for (EntryNumber begin = 0; begin < count; begin += CacheState::kScanPart) {
        const std::lock_guard lock(state_.writer);
        for (EntryNumber number = begin; number < std::min(count, begin + CacheState::kScanPart); ++number) {
            const Entry& entry = state_.view.entries[number];
            const bool is_it = EntryWord(entry.word.load(kRelaxed)).is_readable() &&
                               namespace_of(entry.space.load(kRelaxed)) == name_space;
            removed += is_it && state_.store.remove(number, Leaving::cleared);
        }
    }
    return removed;
}

}  // namespace kvo
