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

void SlruPolicy::admit(const Admission& admission) {
    const EntryNumber parent = admission.parent;
    if (lists_.knows(parent) && lists_.list_of(parent) == kProbation) {
        lists_.add_behind(parent, admission.entry, admission.name, admission.size_bytes);
    } else {
        lists_.add(admission.entry, kProbation, admission.name, admission.size_bytes);
    }
}

void SlruPolicy::touch(std::span<const EntryNumber> entries) {
    for (const EntryNumber entry : std::views::reverse(entries)) {
        lists_.move(entry, kProtected);
    }
    demote_surplus();
}

EntryNumber SlruPolicy::choose_victim() {
    const EntryNumber victim = lists_.oldest(kProbation);
    return victim != kNoEntry ? victim : lists_.oldest(kProtected);
}

void SlruPolicy::keep(EntryNumber entry) {
    lists_.move(entry, kProtected);
    demote_surplus();
}

void SlruPolicy::remove(EntryNumber entry, bool) { lists_.remove(entry); }

void SlruPolicy::demote_surplus() {
    while (lists_.bytes(kProtected) > protected_limit_bytes_) {
        lists_.move(lists_.oldest(kProtected), kProbation);
    }
}

}  // namespace kvo
