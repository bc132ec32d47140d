// Calls of a thread that serves all domains: what has to be done under the writer's lock of one of them is left there.
#include <algorithm>
#include <utility>

#include "cache/cache_core.hpp"
#include "index/lookup.hpp"

namespace kvo {

void CacheCore::leave_invalidate(Space space, std::span<const std::uint8_t> hashes) {
    for (std::size_t begin = 0; begin < hashes.size(); begin += CacheState::kPart * kHashBytes) {
        const auto part = hashes.subspan(begin, std::min(CacheState::kPart * kHashBytes, hashes.size() - begin));
        state_.writer.leave(
            [this, space, own = std::vector<std::uint8_t>(part.begin(), part.end())] { invalidate_part(space, own); });
    }
}

bool CacheCore::leave_evict(std::span<const std::uint32_t> name_spaces) {
    if (is_evicting_.exchange(true)) {
        return false;
    }
    auto wanted = std::make_shared<std::vector<std::uint32_t>>(kNamespaceLimit, kNamespaceNumbers);  // nobody's
    for (const std::uint32_t number : name_spaces) {
        (*wanted)[place_of_namespace(number)] = number;
    }
    state_.writer.leave([this, wanted = std::move(wanted)] { evict_all(wanted, 0); });
    return !is_evicting_.load();
}

// With the writer's lock: of the entries from this one on.
void CacheCore::evict_all(const std::shared_ptr<const std::vector<std::uint32_t>>& by_place, EntryNumber begin) {
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

std::unique_lock<WriterLock> CacheCore::hold_writer() { return std::unique_lock(state_.writer); }

}  // namespace kvo
