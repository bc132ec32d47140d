#include "cache/entry_search.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <limits>

#include "base/memory_order.hpp"
#include "cache/index_reader.hpp"
#include "index/lookup.hpp"

namespace kvo {
namespace {

// A move copies a record first, so that a few tries find an entry between two of them.
constexpr int kListTries = 8;

constexpr bool is_there(EntryWord word) { return word.is_readable() || word.state() == EntryState::moving; }

// Zeros: it has none; its own: that one is not known, or not readable any more.
HashWords parent_of(const IndexView& view, EntryNumber count, const Entry& entry, const HashWords& own) {
    const EntryNumber number = entry.parent.load(kAcquire);
    const int tag = entry.tiers.load(kAcquire) & kParentTag;
    if (tag == kNoParentTag) {
        return {};
    }
    if (number >= count || tag == 0) {
        return own;
    }
    const Entry& parent = view.entries[number];
    const EntryWord word(parent.word.load(kAcquire));
    const HashWords hash = hash_of(parent);
    const bool is_same_space = namespace_of(parent.space.load(kAcquire)) == namespace_of(entry.space.load(kAcquire));
    const bool is_same = EntryWord(parent.word.load(kRelaxed)).generation() == word.generation();
    return is_there(word) && is_same && is_same_space && parent_tag(hash[0]) == tag ? hash : own;
}

// Almost all entries are told by their first word; their first eight bytes are compared at once.
class HashPrefix {
public:
    explicit HashPrefix(std::span<const std::uint8_t> prefix) : prefix_(prefix) {
        std::array<std::uint8_t, sizeof(word_)> first{};
        std::array<std::uint8_t, sizeof(mask_)> ones{};
        const std::size_t count = std::min(prefix.size(), first.size());
        std::copy_n(prefix.begin(), count, first.begin());
        std::fill_n(ones.begin(), count, 0xff);
        word_ = std::bit_cast<std::uint64_t>(first);
        mask_ = std::bit_cast<std::uint64_t>(ones);
    }

    bool may_begin(std::uint64_t first_word) const { return (first_word & mask_) == word_; }
    bool begins(const HashWords& hash) const {
        return std::ranges::equal(prefix_, std::as_bytes(std::span(hash)).first(prefix_.size()), {}, {},
                                  [](std::byte one) { return static_cast<std::uint8_t>(one); });
    }

private:
    std::span<const std::uint8_t> prefix_;
    std::uint64_t word_ = 0;
    std::uint64_t mask_ = 0;
};

}  // namespace

Status EntrySearch::lookup(Space space, std::span<const std::uint8_t> hashes, std::span<std::uint8_t> found) const {
    return find_readable(state_.view, space, hashes, found);
}

// A walk over all entries, without the writer's lock.
Result<EntrySurvey> EntrySearch::survey(std::span<const std::uint8_t> prefix, std::size_t limit) const {
    if (prefix.size() > kHashBytes) {
        return Status(Code::invalid, "a hash has 32 bytes, and its beginning no more");
    }
    const HashPrefix wanted(prefix);
    EntrySurvey survey;
    std::vector<std::pair<EntryNumber, std::uint32_t>> found;  // with their generations
    const EntryNumber count = state_.view.header->entry_count.load(kAcquire);
    for (EntryNumber number = 0; number < count; ++number) {
        const Entry& entry = state_.view.entries[number];
        if (!wanted.may_begin(entry.hash[0].load(kRelaxed))) {
            continue;
        }
        const EntryWord word(entry.word.load(kAcquire));
        EntryFacts facts{.leases = word.leases()};
        facts.hash = hash_of(entry);
        facts.space = entry.space.load(kAcquire);
        facts.was_used = (entry.tiers.load(kAcquire) & kWasUsed) != 0;
        facts.tenant = entry.tenant.load(kAcquire);
        // A thread that gives an entry to another block changes its generation first.
        const bool is_same = EntryWord(entry.word.load(kRelaxed)).generation() == word.generation();
        if (!is_same || !is_there(word) || !wanted.begins(facts.hash)) {
            continue;
        }
        if (survey.matches++ < limit) {
            survey.entries.push_back(facts);
            found.emplace_back(number, word.generation());
        }
    }
    const std::lock_guard lock(state_.writer);
    for (std::size_t i = 0; i < found.size(); ++i) {
        const auto [number, generation] = found[i];
        if (EntryWord(state_.view.entries[number].word.load(kRelaxed)).generation() == generation) {
            survey.entries[i].stored_s = state_.store.stored_for(number);
        }
    }
    return survey;
}

EntryListing EntrySearch::list(std::uint32_t name_space, EntryNumber first, std::size_t limit) const {
    EntryListing listing;
    const EntryNumber count = state_.view.header->entry_count.load(kAcquire);
    const EntryNumber end = first < count ? first + std::min(kListPart, count - first) : first;
    EntryNumber number = first;
    for (; number < end && listing.hashes.size() < limit; ++number) {
        const Entry& entry = state_.view.entries[number];
        // A block that moves meanwhile was there all the time, and nothing else tells of it: it is read again.
        for (int tries = 0; tries < kListTries; ++tries) {
            const EntryWord word(entry.word.load(kAcquire));
            const Space space = entry.space.load(kAcquire);
            if (!is_there(word) || namespace_of(space) != name_space) {
                break;
            }
            const HashWords hash = hash_of(entry);
            const HashWords parent = parent_of(state_.view, count, entry, hash);
            if (EntryWord(entry.word.load(kRelaxed)).generation() == word.generation()) {
                listing.groups.push_back(group_of(space));
                listing.hashes.push_back(hash);
                listing.parents.push_back(parent);
                break;
            }
        }
    }
    listing.next = number < count ? number : 0;
    return listing;
}

Status EntrySearch::find_used(Space space, std::span<const std::uint8_t> hashes, std::span<std::uint8_t> found,
                              std::optional<std::uint32_t> since) const {
    if (!state_.use_space(space) || hashes.size() != found.size() * kHashBytes) {
        return {Code::invalid, "no such group, or hashes that have not 32 bytes each"};
    }
    std::vector<Found> entries(found.size());
    find_entries(state_.view, space, hashes, 1, entries);
    for (std::size_t i = 0; i < found.size(); ++i) {
        found[i] = 0;
        if (entries[i].entry == kNoEntry) {
            continue;
        }
        const Entry& entry = state_.view.entries[entries[i].entry];
        const bool was_used = (entry.tiers.load(kRelaxed) & kWasUsed) != 0;
        const auto later = static_cast<std::int32_t>(entry.recency.load(kRelaxed) - since.value_or(0));
        found[i] = was_used && (!since || later > 0) ? 1 : 0;
    }
    return {};
}

Status EntrySearch::find_departed(Space space, std::span<const std::uint8_t> hashes,
                                  std::span<std::optional<Departed>> found) const {
    if (!state_.use_space(space) || hashes.size() != found.size() * kHashBytes) {
        return {Code::invalid, "no such group, or hashes that have not 32 bytes each"};
    }
    const std::lock_guard lock(state_.writer);
    for (std::size_t i = 0; i < found.size(); ++i) {
        found[i] = state_.store.find_departed(space, read_hash(hashes.data() + i * kHashBytes)[0]);
    }
    return {};
}

Status EntrySearch::find_stored(Space space, std::span<const std::uint8_t> hashes,
                                std::span<std::optional<std::uint32_t>> found) const {
    if (!state_.use_space(space) || hashes.size() != found.size() * kHashBytes) {
        return {Code::invalid, "no such group, or hashes that have not 32 bytes each"};
    }
    const std::lock_guard lock(state_.writer);
    for (std::size_t i = 0; i < found.size(); ++i) {
        const EntryNumber entry = find_entry(state_.view, {read_hash(hashes.data() + i * kHashBytes), space}).entry;
        found[i] = entry == kNoEntry ? std::nullopt : state_.store.stored_for(entry);
    }
    return {};
}

Status EntrySearch::find_values(Space space, std::span<const std::uint8_t> hashes, std::span<double> found) const {
    if (!state_.use_space(space) || hashes.size() != found.size() * kHashBytes) {
        return {Code::invalid, "no such group, or hashes that have not 32 bytes each"};
    }
    const std::lock_guard lock(state_.writer);
    for (std::size_t i = 0; i < found.size(); ++i) {
        const EntryNumber entry = find_entry(state_.view, {read_hash(hashes.data() + i * kHashBytes), space}).entry;
        found[i] = entry == kNoEntry ? std::numeric_limits<float>::lowest() : state_.store.value_of(entry);
    }
    return {};
}

}  // namespace kvo
