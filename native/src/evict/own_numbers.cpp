#include "evict/own_numbers.hpp"

namespace kvo {

void OwnNumbers::admit(const Admission& admission) {
    EntryNumber place = count_;
    if (free_.empty()) {
        ++count_;
    } else {
        place = free_.back();
        free_.pop_back();
    }
    entries_.grow_to(place) = admission.entry;
    places_->grow_to(admission.entry) = place;
    Admission own = admission;
    own.entry = place;
    own.parent = place_of(admission.parent);
    policy_->admit(own);
}

void OwnNumbers::touch(std::span<const EntryNumber> entries) {
    touched_.clear();
    for (const EntryNumber entry : entries) {
        touched_.push_back(place_of(entry));
    }
    policy_->touch(touched_);
}

void OwnNumbers::spare(EntryNumber entry) {
    if (const EntryNumber place = place_of(entry); place != kNoEntry) {
        policy_->spare(place);
    }
}

void OwnNumbers::note_tier(EntryNumber entry, bool has) {
    if (const EntryNumber place = place_of(entry); place != kNoEntry) {
        policy_->note_tier(place, has);
    }
}

void OwnNumbers::remove(EntryNumber entry, bool was_evicted) {
    const EntryNumber place = place_of(entry);
    policy_->remove(place, was_evicted);
    entries_[place] = kNoEntry;
    free_.push_back(place);
}

EntryNumber OwnNumbers::place_of(EntryNumber entry) const noexcept {
    if (entry == kNoEntry || entry >= places_->size()) {
        return kNoEntry;
    }
    const EntryNumber place = (*places_)[entry];
    return place < count_ && entries_[place] == entry ? place : kNoEntry;
}

}  // namespace kvo
