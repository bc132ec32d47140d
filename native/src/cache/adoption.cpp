#include "cache/adoption.hpp"

#include <algorithm>
#include <mutex>

namespace kvo {

Result<AdoptionReport> Adoption::run(std::span<const TenantTerms> tenants) {
    const std::lock_guard lock(state_.writer);
    state_.namespaces.adopt();
    state_.sessions.adopt();
    const std::vector<std::uint32_t> leased = adopt_lease_lists();
    const auto report = state_.store.adopt([&](EntryNumber entry) { return leased[entry]; },
                                           [&](std::uint16_t place) { return state_.sessions.at(place) != 0; });
    if (!report.ok()) {
        return report;
    }
    // Engines name their identities to a successor again, so identities without blocks may go before there are too
    // many.
    if (state_.namespaces.known() > kNamespaceLimit / 2) {
        state_.namespaces.forget([this](std::uint32_t number) { return !state_.store.has_entries(number); });
    }
    // Not before: by now no entry has a number that was another tenant's.
    for (const TenantTerms& tenant : tenants) {
        if (const auto opened = state_.store.tenants().open(tenant.name, tenant.quota_bytes); !opened.ok()) {
            return opened.fault();
        }
    }
    for (EntryNumber entry = 0; entry < leased.size(); ++entry) {
        const EntryWord word(state_.view.entries[entry].word.load());
        if (word.state() == EntryState::reserved) {
            reservations_.adopt(Reservation::of(state_.view.entries[entry].recency.load()).session, entry);
        }
    }
    for (std::uint16_t place = 0; place < kSessionLimit; ++place) {
        if (const SessionId session = state_.sessions.at(place); session != 0) {
            adopt_leases(session);
        }
    }
    for (EntryNumber entry = 0; entry < leased.size(); ++entry) {
        if (EntryWord(state_.view.entries[entry].word.load()).leases() != 0) {
            state_.store.tenants().hold(state_.view.entries[entry].tenant.load(),
                                        state_.store.slot_bytes(entry).size());
        }
    }
    return report;
}

// How many leases each entry has. What the entries say about it may be half an acquire or half a release; the lists are
// whole.
std::vector<std::uint32_t> Adoption::adopt_lease_lists() {
    std::vector<std::uint32_t> leased(state_.view.header->entry_count.load());
    state_.lease_lists.adopt([&](std::uint32_t session, std::span<const EntryNumber> list) {
        const bool is_sound = state_.sessions.is_known(session) &&
                              std::ranges::all_of(list, [&](EntryNumber entry) { return entry < leased.size(); });
        for (const EntryNumber entry : is_sound ? list : std::span<const EntryNumber>{}) {
            ++leased[entry];
        }
        return is_sound;
    });
    return leased;
}

// A lease on an entry that could not be kept is none: its number will be another entry's.
void Adoption::adopt_leases(SessionId session) {
    const auto is_held = [&](EntryNumber entry) {
        return EntryWord(state_.view.entries[entry].word.load()).leases() != 0;
    };
    for (const LeaseId lease : state_.lease_lists.list(session)) {
        bool is_sound = true;
        state_.lease_lists.each_entry(lease, [&](EntryNumber entry) { is_sound = is_sound && is_held(entry); });
        std::vector<EntryNumber> entries;
        if (!is_sound && state_.lease_lists.close(lease, session, entries)) {
            for (const EntryNumber entry : entries) {
                if (is_held(entry)) {
                    state_.view.entries[entry].word.fetch_sub(1);
                    state_.store.end_quarantine(entry);
                }
            }
            continue;
        }
        Holding held;
        state_.lease_lists.each_entry(lease, [&](EntryNumber entry) {
            held.bytes += state_.store.slot_bytes(entry).size();
            ++held.entries;
        });
        held.nodes = LeaseTable::count_nodes(held.entries);
        state_.sessions.charge_adopted(session_place(session), held);
    }
}

}  // namespace kvo
