#include "replay/s3fifo.hpp"

#include <algorithm>

namespace kvo {
namespace {

// An entry's mark counts its uses since it was queued.
constexpr std::uint8_t kMostUses = 3;
constexpr std::uint8_t kUsesToPass = 2;

}  // namespace

void S3FifoPolicy::admit(const Admission& admission) {
    const std::size_t list = ghosts_.take(admission.name) > 0 ? kMain : kSmall;
    const EntryNumber parent = admission.parent;
    kept_ = 0;
    // A queue would lose parents first, so of entries that come together the deeper ones stand behind. A parent that
    // was used since it came is of another time.
    if (lists_.knows(parent) && lists_.list_of(parent) == list && lists_.mark(parent) == 0) {
        lists_.add_behind(parent, admission.entry, admission.name, admission.size_bytes);
    } else {
        lists_.add(admission.entry, list, admission.name, admission.size_bytes);
    }
}

void S3FifoPolicy::touch(std::span<const EntryNumber> entries) {
    kept_ = 0;
    for (const EntryNumber entry : entries) {
        lists_.set_mark(entry, std::min<std::uint8_t>(kMostUses, static_cast<std::uint8_t>(lists_.mark(entry) + 1)));
    }
}

// Entries that may stay are moved on the way; the oldest of a queue is the answer once it may not.
EntryNumber S3FifoPolicy::choose_victim() {
    while (true) {
        const bool has_small = lists_.count(kSmall) > 0;
        // If the whole main queue is in use, the victim comes from the small queue, however short it is, and otherwise
        // from the main queue's end.
        const bool is_main_kept = kept_ >= lists_.count(kMain);
        if (has_small && (lists_.bytes(kSmall) > small_bytes_ || is_main_kept)) {
            const EntryNumber entry = lists_.oldest(kSmall);
            if (lists_.mark(entry) < kUsesToPass) {
                return entry;
            }
            lists_.set_mark(entry, 0);
            lists_.move(entry, kMain);
            continue;
        }
        const EntryNumber entry = lists_.oldest(kMain);
        if (entry == kNoEntry || lists_.mark(entry) == 0 || is_main_kept) {
            return entry;
        }
        lists_.set_mark(entry, static_cast<std::uint8_t>(lists_.mark(entry) - 1));
        lists_.move(entry, kMain);
    }
}

void S3FifoPolicy::keep(EntryNumber entry) {
    kept_ += 1;
    lists_.move(entry, kMain);
}

void S3FifoPolicy::remove(EntryNumber entry, bool was_evicted) {
    if (was_evicted && lists_.list_of(entry) == kSmall) {
        ghosts_.add(lists_.name(entry), lists_.size_bytes(entry));
        while (ghosts_.bytes() > ghost_bytes_) {
            ghosts_.drop_oldest();
        }
    }
    lists_.remove(entry);
}

}  // namespace kvo
