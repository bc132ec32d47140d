#include "replay/arc.hpp"

#include <algorithm>
#include <ranges>

namespace kvo {

void ArcPolicy::admit(const Admission& admission) {
    const std::size_t list = learn(admission.name) ? kAgain : kOnce;
    const EntryNumber parent = admission.parent;
    kept_ = 0;
    if (lists_.knows(parent) && lists_.list_of(parent) == list) {
        lists_.add_behind(parent, admission.entry, admission.name, admission.size_bytes);
    } else {
        lists_.add(admission.entry, list, admission.name, admission.size_bytes);
    }
}

// Whether the name left not long ago. The fewer names a list remembers, the more each that comes back says.
bool ArcPolicy::learn(std::uint64_t name) {
    const std::uint64_t once = once_ghosts_.bytes();
    const std::uint64_t again = again_ghosts_.bytes();
    if (const std::uint64_t size = once_ghosts_.take(name); size > 0) {
        const std::uint64_t step = size * std::max<std::uint64_t>(1, again / once);
        once_target_bytes_ = std::min(capacity_bytes_, once_target_bytes_ + step);
        return true;
    }
    if (const std::uint64_t size = again_ghosts_.take(name); size > 0) {
        const std::uint64_t step = size * std::max<std::uint64_t>(1, once / again);
        once_target_bytes_ -= std::min(once_target_bytes_, step);
        return true;
    }
    return false;
}

void ArcPolicy::touch(std::span<const EntryNumber> entries) {
    kept_ = 0;
    for (const EntryNumber entry : std::views::reverse(entries)) {
        lists_.move(entry, kAgain);
    }
}

EntryNumber ArcPolicy::choose_victim() {
    // With all of the second list in use the first one gives, however little it has.
    const bool is_again_kept = kept_ >= lists_.count(kAgain);
    const bool is_once = lists_.bytes(kOnce) > once_target_bytes_ || (is_again_kept && lists_.count(kOnce) > 0);
    return lists_.oldest(is_once ? kOnce : kAgain);
}

void ArcPolicy::keep(EntryNumber entry) {
    kept_ += 1;
    lists_.move(entry, kAgain);
}

void ArcPolicy::remove(EntryNumber entry, bool was_evicted) {
    const bool was_once = lists_.list_of(entry) == kOnce;
    const std::uint64_t name = lists_.name(entry);
    const std::uint64_t size_bytes = lists_.size_bytes(entry);
    lists_.remove(entry);
    if (was_evicted) {
        (was_once ? once_ghosts_ : again_ghosts_).add(name, size_bytes);
        trim_ghosts();
    }
}

// Keeps entries and names of the first list within the capacity, and those of all lists within twice the capacity.
void ArcPolicy::trim_ghosts() {
    const auto once_bytes = [this] { return lists_.bytes(kOnce) + once_ghosts_.bytes(); };
    while (once_bytes() > capacity_bytes_ && once_ghosts_.count() > 0) {
        once_ghosts_.drop_oldest();
    }
    while (once_bytes() + lists_.bytes(kAgain) + again_ghosts_.bytes() > 2 * capacity_bytes_ &&
           again_ghosts_.count() > 0) {
        again_ghosts_.drop_oldest();
    }
}

}  // namespace kvo
