#include "cache/removals.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/memory_order.hpp"
#include "index/lookup.hpp"

namespace kvo {

std::size_t Removals::invalidate(Space space, std::span<const std::uint8_t> hashes) {
    std::size_t removed = 0;
    const std::size_t count = hashes.size() / kHashBytes;
    for (std::size_t begin = 0; begin < count; begin += CacheState::kPart) {
        const std::lock_guard lock(state_.writer);
        removed += invalidate_part(
            space, hashes.subspan(begin * kHashBytes, std::min(CacheState::kPart, count - begin) * kHashBytes));
    }
    return removed;
}

std::size_t Removals::invalidate_part(Space space, std::span<const std::uint8_t> hashes) {
    std::size_t removed = 0;
    for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
        const EntryNumber entry = find_entry(state_.view, {read_hash(hashes.data() + at), space}).entry;
        removed += entry != kNoEntry && state_.store.remove(entry, Leaving::untrusted);
    }
    return removed;
}

std::uint64_t Removals::evict(std::uint64_t bytes) {
    const auto used = [this] { return state_.store.counts().used_bytes.load(kRelaxed); };
    bytes = std::min(bytes, capacity_bytes_);
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

std::size_t Removals::clear(std::uint32_t name_space) {
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

void Removals::leave_invalidate(Space space, std::span<const std::uint8_t> hashes) {
    for (std::size_t begin = 0; begin < hashes.size(); begin += CacheState::kPart * kHashBytes) {
        const auto part = hashes.subspan(begin, std::min(CacheState::kPart * kHashBytes, hashes.size() - begin));
        state_.writer.leave(
            [this, space, own = std::vector<std::uint8_t>(part.begin(), part.end())] { invalidate_part(space, own); });
    }
}

void Removals::leave_tier_notes(Space space, std::span<const std::uint8_t> hashes, std::span<const std::uint8_t> has) {
    assert(hashes.size() == has.size() * kHashBytes);
    for (std::size_t begin = 0; begin < has.size(); begin += CacheState::kPart) {
        const std::size_t count = std::min(CacheState::kPart, has.size() - begin);
        const auto names = hashes.subspan(begin * kHashBytes, count * kHashBytes);
        const auto notes = has.subspan(begin, count);
        state_.writer.leave([this, space, names = std::vector<std::uint8_t>(names.begin(), names.end()),
                             notes = std::vector<std::uint8_t>(notes.begin(), notes.end())] {
            for (std::size_t at = 0; at < notes.size(); ++at) {
                const HashWords hash = read_hash(names.data() + at * kHashBytes);
                if (const EntryNumber entry = find_entry(state_.view, {hash, space}).entry; entry != kNoEntry) {
                    state_.store.note_tier(entry, notes[at] != 0);
                }
            }
        });
    }
}

bool Removals::leave_evict(std::span<const std::uint32_t> name_spaces) {
    if (is_evicting_.exchange(true)) {
        return false;
    }
    auto wanted = std::make_shared<std::vector<std::uint32_t>>(kNamespaceLimit, kNamespaceNumbers);  // none's
    for (const std::uint32_t number : name_spaces) {
        (*wanted)[place_of_namespace(number)] = number;
    }
    state_.writer.leave([this, wanted = std::move(wanted)] { evict_all(wanted, 0); });
    return !is_evicting_.load();
}

// Goes through a part of the entries, from `begin` on. The caller holds the writer's lock.
void Removals::evict_all(const std::shared_ptr<const std::vector<std::uint32_t>>& by_place, EntryNumber begin) {
    const EntryNumber count = state_.view.header->entry_count.load(std::memory_order_acquire);
    const EntryNumber end = std::min(count, begin + CacheState::kScanPart);
    for (EntryNumber number = begin; number < end; ++number) {
        const Entry& entry = state_.view.entries[number];
        const std::uint32_t name_space = namespace_of(entry.space.load(std::memory_order_relaxed));
        if (EntryWord(entry.word.load(std::memory_order_relaxed)).is_readable() &&
            (*by_place)[place_of_namespace(name_space)] == name_space) {
            state_.store.remove(number, Leaving::evicted);
        }
    }
    if (end < count) {
        state_.writer.leave_rest([this, by_place, end] { evict_all(by_place, end); });
    } else {
        is_evicting_.store(false);
    }
}

std::vector<std::uint32_t> Removals::forget_namespaces(std::span<const std::uint32_t> kept) {
    std::vector<std::uint32_t> sorted(kept.begin(), kept.end());
    std::ranges::sort(sorted);
    // A call that adds an entry uses its namespace.
    return state_.namespaces.forget([&](std::uint32_t number) {
        return !std::ranges::binary_search(sorted, number) && !state_.store.has_entries(number);
    });
}

}  // namespace kvo
