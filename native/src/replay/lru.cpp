#include "replay/lru.hpp"

#include <ranges>

namespace kvo {

void LruPolicy::admit(const Admission& admission) {
    if (lists_.knows(admission.parent)) {
        lists_.add_behind(admission.parent, admission.entry, admission.name, admission.size_bytes);
    } else {
        lists_.add(admission.entry, 0, admission.name, admission.size_bytes);
    }
}

void LruPolicy::touch(std::span<const EntryNumber> entries) {
    for (const EntryNumber entry : std::views::reverse(entries)) {
        lists_.move(entry, 0);
    }
}

void LruPolicy::remove(EntryNumber entry, bool) { lists_.remove(entry); }

}  // namespace kvo
