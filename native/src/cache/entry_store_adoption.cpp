// EntryStore: what a new process makes of the entries that a dead one left.
#include <algorithm>
#include <cassert>

#include "base/memory_order.hpp"
#include "cache/entry_store.hpp"
#include "index/lookup.hpp"

namespace kvo {

Result<AdoptionReport> EntryStore::adopt(const std::function<std::uint32_t(EntryNumber)>& leases,
                                         const std::function<bool(std::uint16_t)>& may_write) {
    if (Status status = table_.reset(); !status.ok()) {
        return status;
    }
    const EntryNumber count = std::min(view_.header->entry_count.load(kRelaxed), view_.header->entry_limit);
    AdoptionReport report;
    std::vector<Survivor> survivors;
    for (EntryNumber number = 0; number < count; ++number) {
        const EntryState before = word(number).state();
        if (before != EntryState::free && adopt_entry(number, leases(number), may_write)) {
            if (word(number).is_readable()) {
                survivors.push_back({number, view_.entries[number].recency.load(kRelaxed)});
            }
            continue;
        }
        report.dropped += before != EntryState::free;
        view_.entries[number].word.store(word(number).next(EntryState::free).bits(), kRelease);
        free_number(number);
    }
    adopt_survivors(survivors, report);
    report.readable = counts_.readable.load(kRelaxed);
    report.reserved = counts_.reserved.load(kRelaxed);
    view_.header->version_counter.fetch_add(1, kRelease);
    return report;
}

// False: it is not to be kept. Fields may be anything if the file was damaged, so each is checked before it is used.
bool EntryStore::adopt_entry(EntryNumber number, std::uint32_t leases,
                             const std::function<bool(std::uint16_t)>& may_write) {
    Entry& entry = view_.entries[number];
    const EntryWord now = word(number);
    const bool is_readable = now.is_readable() || now.state() == EntryState::moving;
    const bool is_reserved =
        now.state() == EntryState::reserved && may_write(Reservation::of(entry.recency.load(kRelaxed)).session);
    const bool is_quarantined = now.state() == EntryState::quarantined && leases != 0;
    const Space space = entry.space.load(kRelaxed);
    const Namespace* const name_space = namespaces_.find(namespace_of(space));
    if ((!is_readable && !is_reserved && !is_quarantined) || name_space == nullptr ||
        group_of(space) >= name_space->groups.size()) {
        return false;
    }
    const GroupFacts& facts = name_space->groups[group_of(space)];
    const Result<ClassNumber> size_class = arena_.class_for(facts.class_bytes);
    if (!size_class.ok() ||
        arena_.claim(size_class.value(), unpack_slot(entry.slot.load(kRelaxed)), number) != Claim::granted) {
        return false;
    }
    if (!tenants_.is_known(entry.tenant.load(kRelaxed))) {
        entry.tenant.store(0, kRelease);
    }
    tenants_.add_bytes(entry.tenant.load(kRelaxed), facts.slot_bytes);
    count_used(space, facts.slot_bytes);
    counts_.readable.fetch_add(is_readable, kRelaxed);
    counts_.reserved.fetch_add(is_reserved, kRelaxed);
    counts_.quarantined.fetch_add(is_quarantined, kRelaxed);
    if (is_readable) {
        // The record is checked before it is trusted.
        entry.word.store(now.with_state(EntryState::readable).with_leases(leases).with_unverified(true).bits(),
                         kRelease);
    } else {
        entry.word.store(now.with_leases(is_reserved ? 0 : leases).bits(), kRelease);
    }
    return true;
}

// Names them again, and tells the policies, the least recently used first, parents before their children.
void EntryStore::adopt_survivors(std::vector<Survivor>& survivors, AdoptionReport& report) {
    const std::uint32_t clock = view_.header->clock.load(kRelaxed);
    std::ranges::stable_sort(survivors, std::greater{}, [&](const Survivor& s) { return clock - s.recency; });
    std::vector<bool> is_waiting(view_.header->entry_count.load(kRelaxed));
    for (const Survivor& survivor : survivors) {
        Key key{{}, view_.entries[survivor.entry].space.load(kRelaxed)};
        for (std::size_t i = 0; i < key.hash.size(); ++i) {
            key.hash[i] = view_.entries[survivor.entry].hash[i].load(kRelaxed);
        }
        // If two have one name, the first keeps it; the other goes when its leases end.
        const bool is_double = find_entry(view_, key).entry != kNoEntry;
        // One that the table refuses goes likewise: its key was chosen, or memory is short.
        if (!is_double && table_.insert(survivor.entry).ok()) {
            is_waiting[survivor.entry] = true;
            continue;
        }
        const EntryWord now = word(survivor.entry);
        counts_.readable.fetch_sub(1, kRelaxed);
        counts_.quarantined.fetch_add(1, kRelaxed);
        ++report.dropped;
        view_.entries[survivor.entry].word.store(now.next(EntryState::quarantined).with_leases(now.leases()).bits(),
                                                 kRelease);
        end_quarantine(survivor.entry);
    }
    admit_in_order(survivors, is_waiting);
}

void EntryStore::admit_in_order(const std::vector<Survivor>& survivors, std::vector<bool>& is_waiting) {
    std::vector<EntryNumber> ancestors;
    for (const Survivor& survivor : survivors) {
        EntryNumber entry = survivor.entry;
        while (entry < is_waiting.size() && is_waiting[entry]) {
            is_waiting[entry] = false;
            ancestors.push_back(entry);
            entry = usable_parent(entry);
        }
        // Numbers are used again, so hints of entries long apart can form a circle.
        if (std::ranges::find(ancestors, entry) != ancestors.end()) {
            view_.entries[ancestors.back()].parent.store(kNoEntry, kRelease);
        }
        for (; !ancestors.empty(); ancestors.pop_back()) {
            admit(ancestors.back());
            note(ancestors.back(), PoolNote::Kind::adoption);
        }
    }
}

}  // namespace kvo
