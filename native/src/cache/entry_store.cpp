#include "cache/entry_store.hpp"

#include <algorithm>
#include <cassert>
#include <ctime>
#include <utility>

#include "arena/span_table.hpp"
#include "base/memory_order.hpp"
#include "index/lookup.hpp"

namespace kvo {
namespace {

constexpr std::size_t kDepartureLimit = std::size_t{1} << 20;

std::uint32_t now_s() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return static_cast<std::uint32_t>(now.tv_sec);
}

}  // namespace

EntryStore::EntryStore(IndexFile& index, std::vector<Segment>& segments, const NamespaceTable& namespaces,
                       TenantTable tenants, Arena arena)
    : index_(index),
      view_(index.view()),
      segments_(segments),
      namespaces_(namespaces),
      tenants_(std::move(tenants)),
      arena_(std::move(arena)),
      table_(view_, [&index](const Region& region, std::uint64_t count) { return index.ensure(region, count); }),
      departures_(std::min<std::size_t>(view_.header->entry_limit, kDepartureLimit)) {}

Status EntryStore::start() { return table_.reset(); }

Status EntryStore::add_extents(std::uint64_t count) { return arena_.add_extents(static_cast<std::uint32_t>(count)); }

void EntryStore::withdraw(std::uint32_t segment) { arena_.withdraw(segment); }

void EntryStore::cut_withdrawn() {
    arena_.cut_withdrawn();
    const std::uint64_t ready = arena_.extent_count() * view_.header->extent_bytes;
    view_.header->ready_bytes.store(ready, kRelease);
    tell_used();
}

void EntryStore::restore_withdrawn() { arena_.restore_withdrawn(); }

void EntryStore::expect_room(std::uint32_t seconds) { room_until_s_ = seconds == 0 ? 0 : now_s() + seconds; }

bool EntryStore::is_room_coming() const { return room_until_s_ != 0 && now_s() < room_until_s_; }

Result<ClassNumber> EntryStore::open_class(Space space) { return arena_.class_for(facts_of(space).class_bytes); }

EntryNumber EntryStore::reserve(Space space, ClassNumber size_class, TenantNumber tenant, std::uint16_t session,
                                Effort& effort) {
    effort.is_unfinished = false;
    const bool has_shards = namespaces_.find(namespace_of(space))->has_shards;
    // Counted before room is made: a tenant that goes over its quota by this reservation makes the room for it.
    const std::uint64_t bytes = facts_of(space).slot_bytes;
    tenants_.add_bytes(tenant, bytes);
    const bool may_hold = tenants_.hold(tenant, bytes);
    EntryNumber number = may_hold ? take_number(has_shards) : kNoEntry;
    const bool is_full =
        first_free_ == kNoEntry && view_.header->entry_count.load(kRelaxed) == view_.header->entry_limit;
    if (number == kNoEntry && may_hold && is_full && evict_one(tenant)) {
        number = take_number(has_shards);
    }
    const std::optional<Slot> slot = number == kNoEntry ? std::nullopt : make_slot(size_class, number, tenant, effort);
    if (!slot) {
        effort.is_quota_used = !may_hold || tenants_.is_over_quota(tenant);
        tenants_.let_go(tenant, bytes);
        tenants_.subtract_bytes(tenant, bytes);
        if (number != kNoEntry) {
            free_number(number);
        }
        return kNoEntry;
    }
    Entry& entry = view_.entries[number];
    entry.slot.store(pack_slot(*slot), kRelease);
    entry.space.store(space, kRelease);
    entry.parent.store(kNoEntry, kRelease);
    entry.tiers.store(0, kRelease);
    entry.tenant.store(tenant, kRelease);
    entry.recency.store(Reservation{session, 0}.bits(), kRelease);
    entry.word.store(word(number).next(EntryState::reserved).bits(), kRelease);
    is_full_ = is_full_ || effort.evicted_bytes != 0;
    count_used(space, bytes);
    counts_.reserved.fetch_add(1, kRelaxed);
    return number;
}

Status EntryStore::publish(EntryNumber number, const HashWords& hash, EntryNumber parent, std::uint16_t tag,
                           bool was_promoted) {
    Entry& entry = view_.entries[number];
    assert(word(number).state() == EntryState::reserved);
    for (std::size_t i = 0; i < hash.size(); ++i) {
        entry.hash[i].store(hash[i], kRelease);
    }
    entry.parent.store(parent, kRelease);
    entry.tiers.store(kInMemory | tag, kRelease);
    Status status = table_.insert(number);
    while (!status.ok() && evict_rival(number)) {
        status = table_.insert(number);
    }
    if (!status.ok()) {
        return status;
    }
    entry.word.store(word(number).next(EntryState::readable).bits(), kRelease);
    // Not before: if this process dies in between, it is still the reservation that is read there.
    entry.recency.store(view_.header->clock.load(kRelaxed), kRelease);
    view_.header->version_counter.fetch_add(1, kRelease);
    end_reserved(number);
    counts_.readable.fetch_add(1, kRelaxed);
    stored_at_.grow_to(number) = StoredAt(now_s());
    admit(number);
    note(number, was_promoted ? PoolNote::Kind::promotion : PoolNote::Kind::save);
    if (orphans_ != 0) {
        find_orphans(number, hash);
    }
    return {};
}

void EntryStore::charge(EntryNumber number, TenantNumber tenant) {
    Entry& entry = view_.entries[number];
    assert(word(number).state() == EntryState::reserved);
    const std::uint64_t bytes = facts_of(entry.space.load(kRelaxed)).slot_bytes;
    tenants_.subtract_bytes(entry.tenant.load(kRelaxed), bytes);
    tenants_.add_bytes(tenant, bytes);
    tenants_.let_go(entry.tenant.load(kRelaxed), bytes);
    tenants_.hold(tenant, bytes);
    entry.tenant.store(tenant, kRelease);
}

Room EntryStore::count_room() const noexcept {
    const Holding all{.bytes = view_.header->ready_bytes.load(kRelaxed), .entries = view_.header->entry_limit};
    return {.all = all,
            .left = {.bytes = all.bytes - std::min(all.bytes, tenants_.held_bytes()),
                     .entries = all.entries - std::min(all.entries, tenants_.held_entries())}};
}

// Ends a reservation: no process writes to the slot any more, so that it does not count as in use.
void EntryStore::end_reserved(EntryNumber number) {
    counts_.reserved.fetch_sub(1, kRelaxed);
    const Entry& entry = view_.entries[number];
    tenants_.let_go(entry.tenant.load(kRelaxed), facts_of(entry.space.load(kRelaxed)).slot_bytes);
}

void EntryStore::expect(EntryNumber number, std::uint64_t hash_word) {
    const Space space = view_.entries[number].space.load(kRelaxed);
    tenants_.policy_of(view_.entries[number].tenant.load(kRelaxed)).expect_admission(name_of(space, hash_word));
}

void EntryStore::abort(EntryNumber number) {
    const EntryWord reserved = word(number);
    assert(reserved.state() == EntryState::reserved);
    view_.entries[number].word.store(reserved.next(EntryState::free).bits(), kRelease);
    end_reserved(number);
    give_back(number);
}

bool EntryStore::remove(EntryNumber number, Leaving why) {
    for (EntryWord now = word(number); now.is_readable(); now = word(number)) {
        const bool is_leased = now.leases() != 0;
        const EntryWord gone = now.next(is_leased ? EntryState::quarantined : EntryState::free);
        if (!change_word(number, now, gone.with_leases(now.leases()))) {
            continue;
        }
        unlink(number, false);
        note(number, PoolNote::Kind::removal);
        note_departure(number, why);
        if (is_leased) {
            counts_.quarantined.fetch_add(1, kRelaxed);
        } else {
            give_back(number);
        }
        return true;
    }
    return false;
}

void EntryStore::end_quarantine(EntryNumber number) {
    const EntryWord now = word(number);
    if (now.state() != EntryState::quarantined || now.leases() != 0) {
        return;
    }
    view_.entries[number].word.store(now.next(EntryState::free).bits(), kRelease);
    counts_.quarantined.fetch_sub(1, kRelaxed);
    give_back(number);
}

void EntryStore::spare(EntryNumber number) {
    // It may have gone since it was found; another one in its place is spared for nothing.
    if (word(number).is_readable()) {
        tenants_.policy_of(view_.entries[number].tenant.load(kRelaxed)).spare(number);
    }
}

void EntryStore::touch(std::span<const EntryNumber> entries) {
    EvictionPolicy* policy = nullptr;
    known_.clear();
    const auto tell = [&] {
        if (!known_.empty()) {
            policy->touch(known_);
            known_.clear();
        }
    };
    for (const EntryNumber entry : entries) {
        // It may have gone since it was acquired and released. What came after it does not follow what came before.
        if (!word(entry).is_readable()) {
            tell();
            continue;
        }
        EvictionPolicy& own = tenants_.policy_of(view_.entries[entry].tenant.load(kRelaxed));
        if (policy != &own) {
            tell();
            policy = &own;
        }
        known_.push_back(entry);
    }
    tell();
    note_uses(entries);
}

void EntryStore::note_tier(EntryNumber entry, bool has) {
    if (word(entry).is_readable()) {
        tenants_.policy_of(view_.entries[entry].tenant.load(kRelaxed)).note_tier(entry, has);
    }
}

std::span<std::byte> EntryStore::slot_bytes(EntryNumber number) const {
    const Entry& entry = view_.entries[number];
    return bytes_at(entry.space.load(std::memory_order_acquire),
                    unpack_slot(entry.slot.load(std::memory_order_acquire)));
}

std::uint64_t EntryStore::slot_address(EntryNumber number) const {
    const Entry& entry = view_.entries[number];
    return address_of(entry.space.load(std::memory_order_acquire),
                      unpack_slot(entry.slot.load(std::memory_order_acquire)));
}

// Not asked of the arena, which only the writer may look into.
std::uint64_t EntryStore::address_of(Space space, Slot slot) const {
    return kvo::slot_address(slot, view_.header->extent_bytes, slot_bytes_for(facts_of(space).class_bytes));
}

std::span<std::byte> EntryStore::bytes_at(Space space, Slot slot) const {
    const std::uint64_t address = address_of(space, slot);
    const std::uint64_t segment_bytes = view_.header->segment_bytes;
    return segments_[address / segment_bytes].writable_bytes().subspan(address % segment_bytes,
                                                                       facts_of(space).slot_bytes);
}

const GroupFacts& EntryStore::facts_of(Space space) const {
    return namespaces_.find(namespace_of(space))->groups[group_of(space)];
}

EntryWord EntryStore::word(EntryNumber entry) const {
    return EntryWord(view_.entries[entry].word.load(std::memory_order_acquire));
}

bool EntryStore::change_word(EntryNumber entry, EntryWord expected, EntryWord changed) {
    std::uint64_t bits = expected.bits();
    return view_.entries[entry].word.compare_exchange_strong(bits, changed.bits(), std::memory_order_acq_rel);
}

EntryNumber EntryStore::take_number(bool has_shards) {
    const bool is_new = first_free_ == kNoEntry;
    const EntryNumber number = is_new ? view_.header->entry_count.load(kRelaxed) : first_free_;
    if (is_new && (number == view_.header->entry_limit || !index_.ensure(view_.regions.entries, number + 1).ok() ||
                   !index_.ensure(view_.regions.digests, number + 1).ok())) {
        return kNoEntry;
    }
    // A number used before may have been one without shards.
    if (has_shards && !index_.ensure(view_.regions.shard_digests, number + 1).ok()) {
        return kNoEntry;
    }
    if (is_new) {
        view_.header->entry_count.store(number + 1, kRelease);
    } else {
        first_free_ = view_.entries[number].space.load(kRelaxed);
    }
    return number;
}

void EntryStore::free_number(EntryNumber entry) {
    view_.entries[entry].space.store(first_free_, kRelease);
    first_free_ = entry;
}

// Negative numbers wrap. An entry that goes has read its identity's facts before: see has_entries.
void EntryStore::count_used(Space space, std::uint64_t bytes) {
    counts_.used_bytes.fetch_add(bytes, kRelaxed);
    counts_.used_by[place_of_namespace(namespace_of(space))].fetch_add(bytes, kRelease);
    tell_used();
}

// Holes between records of several sizes are no room: where one entry had to go for another, readers are told that all
// of the memory is in use.
void EntryStore::tell_used() {
    const std::uint64_t used = counts_.used_bytes.load(kRelaxed);
    const std::uint64_t ready = view_.header->ready_bytes.load(kRelaxed);
    is_full_ = is_full_ && used > ready - ready / kRoomShare;
    view_.header->used_bytes.store(is_full_ ? std::max(used, ready) : used, kRelaxed);
}

// Out of the table and its policy; the word says already that it cannot be acquired.
void EntryStore::unlink(EntryNumber number, bool was_evicted) {
    orphans_ -= is_orphan(number);
    tenants_.policy_of(view_.entries[number].tenant.load(kRelaxed)).remove(number, was_evicted);
    table_.erase(number);
    view_.header->version_counter.fetch_add(1, kRelease);
    counts_.readable.fetch_sub(1, kRelaxed);
}

void EntryStore::note_departure(EntryNumber number, Leaving why) {
    const Entry& entry = view_.entries[number];
    const std::uint32_t second = now_s();
    departures_.add(name_of(entry.space.load(kRelaxed), entry.hash[0].load(kRelaxed)),
                    {why, second, counts_.evicted_bytes.load(kRelaxed)});
    if (removed_.is_wanted()) {
        removed_.add({.space = entry.space.load(kRelaxed), .hash = hash_of(entry)});
    }
    if (why == Leaving::evicted) {
        note_residence(number, second);
    }
}

void EntryStore::note_residence(EntryNumber number, std::uint32_t now_s) {
    const Entry& entry = view_.entries[number];
    counts_.evicted.fetch_add(1, kRelaxed);
    counts_.evicted_bytes.fetch_add(facts_of(entry.space.load(kRelaxed)).slot_bytes, kRelaxed);
    if ((entry.tiers.load(kRelaxed) & kWasUsed) == 0) {
        counts_.evicted_unused.fetch_add(1, kRelaxed);
    }
    const auto seconds = number < stored_at_.size() ? stored_at_[number].seconds_until(now_s) : std::nullopt;
    if (seconds) {
        const auto bucket = std::ranges::count_if(kResidenceBounds, [&](auto bound) { return bound < *seconds; });
        counts_.residence[static_cast<std::size_t>(bucket)].fetch_add(1, kRelaxed);
        counts_.residence_seconds.fetch_add(*seconds, kRelaxed);
    }
}

// To keep the block, all that was evicted since then would have had to stay, too.
std::optional<Departed> EntryStore::find_departed(Space space, std::uint64_t hash_word) const {
    const std::optional<Departure> found = departures_.find(name_of(space, hash_word));
    if (!found) {
        return std::nullopt;
    }
    return Departed{found->why, now_s() - found->second, counts_.evicted_bytes.load(kRelaxed) - found->evicted_bytes};
}

std::optional<std::uint32_t> EntryStore::stored_for(EntryNumber number) const {
    return number < stored_at_.size() ? stored_at_[number].seconds_until(now_s()) : std::nullopt;
}

void EntryStore::give_back(EntryNumber number) {
    const Entry& entry = view_.entries[number];
    const std::uint64_t bytes = facts_of(entry.space.load(kRelaxed)).slot_bytes;
    arena_.free(unpack_slot(entry.slot.load(kRelaxed)));
    tenants_.subtract_bytes(view_.entries[number].tenant.load(kRelaxed), bytes);
    count_used(entry.space.load(kRelaxed), ~bytes + 1);
    free_number(number);
}

// kNoEntry unless the hint names an entry that the policy of this one knows and that can be its parent.
EntryNumber EntryStore::usable_parent(EntryNumber number) const {
    const Entry& entry = view_.entries[number];
    const EntryNumber parent = entry.parent.load(kRelaxed);
    if (parent >= view_.header->entry_count.load(kRelaxed) || !word(parent).is_readable()) {
        return kNoEntry;
    }
    const Space space = entry.space.load(kRelaxed);
    const Space anchor = make_space(namespace_of(space), facts_of(space).anchor);
    const bool is_known =
        tenants_.has_one_policy() ||
        tenants_.share_policy(view_.entries[number].tenant.load(kRelaxed), view_.entries[parent].tenant.load(kRelaxed));
    return is_known && parent != number && view_.entries[parent].space.load(kRelaxed) == anchor ? parent : kNoEntry;
}

// A window or a state whose block is not here: no policy can tell what it is worth.
bool EntryStore::is_orphan(EntryNumber number) const {
    const Entry& entry = view_.entries[number];
    const Space space = entry.space.load(kRelaxed);
    return facts_of(space).anchor != group_of(space) && entry.parent.load(kRelaxed) == kNoEntry;
}

void EntryStore::admit(EntryNumber number) {
    Entry& entry = view_.entries[number];
    const Space space = entry.space.load(kRelaxed);
    const GroupFacts& facts = facts_of(space);
    const EntryNumber parent = usable_parent(number);
    if (facts.anchor != group_of(space)) {
        entry.parent.store(parent, kRelease);
    }
    orphans_ += is_orphan(number);
    tenants_.policy_of(entry.tenant.load(kRelaxed))
        .admit({.entry = number,
                .parent = parent,
                .name = name_of(space, entry.hash[0].load(kRelaxed)),
                .size_bytes = facts.slot_bytes,
                .reuse = facts.reuse,
                .needs_state = namespaces_.find(namespace_of(space))->needs_state,
                .window_blocks = facts.window_blocks,
                .group = group_of(space)});
}

// Where slots are short, a block may come later than what hangs on it. Its windows and states have its name.
void EntryStore::find_orphans(EntryNumber block, const HashWords& hash) {
    const Space space = view_.entries[block].space.load(kRelaxed);
    const std::vector<GroupFacts>& groups = namespaces_.find(namespace_of(space))->groups;
    for (std::uint32_t group = 0; group < groups.size(); ++group) {
        if (groups[group].anchor != group_of(space) || group == group_of(space)) {
            continue;
        }
        const EntryNumber found = find_entry(view_, {hash, make_space(namespace_of(space), group)}).entry;
        if (found != kNoEntry && is_orphan(found)) {
            orphans_ -= 1;
            tenants_.policy_of(view_.entries[found].tenant.load(kRelaxed)).remove(found, false);
            view_.entries[found].parent.store(block, kRelease);
            admit(found);
        }
    }
}

// How an entry store tells the curve of what happens.

void EntryStore::note(EntryNumber number, PoolNote::Kind kind) {
    if (curve_ == nullptr) {
        return;
    }
    const Entry& entry = view_.entries[number];
    if (kind == PoolNote::Kind::save) {
        const GroupFacts& facts = facts_of(entry.space.load(kRelaxed));
        curve_->pass({.blocks = facts.reuse == Reuse::prefix ? 1U : 0U, .bytes = facts.slot_bytes});
    }
    const std::uint64_t hash_word = entry.hash[0].load(kRelaxed);
    if (curve_->follows(hash_word)) {
        ShadowRecord record = shadow_of(number);
        record.parent = kind == PoolNote::Kind::removal ? 0 : followed_ancestor(number);
        curve_->add(hash_word, {.record = record, .kind = kind});
    }
}

// Entries of one acquire, group after group.
void EntryStore::note_uses(std::span<const EntryNumber> entries) {
    if (curve_ == nullptr) {
        return;
    }
    const GroupFacts* facts = nullptr;
    Space space = 0;
    bool begins = true;
    std::uint64_t before = 0;  // name of the followed block before this one
    std::uint64_t count = 0;   // of this space since the last note
    const auto pass = [&] {
        if (facts != nullptr) {
            curve_->pass({.blocks = facts->reuse == Reuse::prefix ? count : 0, .bytes = count * facts->slot_bytes});
        }
        count = 0;
    };
    // Most are not followed, so this has to be short.
    for (const EntryNumber number : entries) {
        const Entry& entry = view_.entries[number];
        if (const Space own = entry.space.load(kRelaxed); own != space || facts == nullptr) {
            pass();
            if (!word(number).is_readable()) {
                continue;
            }
            space = own;
            facts = &facts_of(space);
            before = 0;
        }
        count += 1;
        const std::uint64_t hash_word = entry.hash[0].load(kRelaxed);
        if (!curve_->follows(hash_word) || !word(number).is_readable()) {
            continue;
        }
        pass();
        ShadowRecord record = shadow_of(number);
        record.parent = before != 0 && record.reuse == Reuse::prefix ? before : followed_ancestor(number);
        before = record.name;
        curve_->add(hash_word, {.record = record, .kind = PoolNote::Kind::use, .begins = begins});
        begins = false;
    }
    pass();
}

ShadowRecord EntryStore::shadow_of(EntryNumber number) const {
    const Entry& entry = view_.entries[number];
    const Space space = entry.space.load(kRelaxed);
    const GroupFacts& facts = facts_of(space);
    const std::uint64_t hash_word = entry.hash[0].load(kRelaxed);
    const Namespace& name_space = *namespaces_.find(namespace_of(space));
    ShadowRecord record{.name = name_of(space, hash_word),
                        .size_bytes = facts.slot_bytes,
                        .window_blocks = facts.window_blocks,
                        .group = group_of(space),
                        .reuse = facts.reuse,
                        .needs_state = name_space.needs_state && facts.reuse == Reuse::prefix};
    if (record.needs_state) {
        const auto states = std::ranges::find(name_space.groups, Reuse::exact, &GroupFacts::reuse);
        const auto group = static_cast<std::uint32_t>(states - name_space.groups.begin());
        record.state = name_of(make_space(namespace_of(space), group), hash_word);
    }
    return record;
}

// The name of the nearest block that this one depends on and that is followed. A window or a state depends on the block
// of its own name, which is followed as well.
std::uint64_t EntryStore::followed_ancestor(EntryNumber number) const {
    const Space space = view_.entries[number].space.load(kRelaxed);
    const Space anchor = make_space(namespace_of(space), facts_of(space).anchor);
    if (anchor != space) {
        return name_of(anchor, view_.entries[number].hash[0].load(kRelaxed));
    }
    const std::uint32_t count = view_.header->entry_count.load(kRelaxed);
    EntryNumber parent = view_.entries[number].parent.load(kRelaxed);
    for (int step = 0; step < kAncestors && parent < count; ++step) {
        const Entry& entry = view_.entries[parent];
        if (!word(parent).is_readable() || entry.space.load(kRelaxed) != space) {
            break;
        }
        const std::uint64_t hash_word = entry.hash[0].load(kRelaxed);
        if (curve_->follows(hash_word)) {
            return name_of(space, hash_word);
        }
        parent = entry.parent.load(kRelaxed);
    }
    return 0;
}

}  // namespace kvo
