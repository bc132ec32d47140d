// How an entry store tells the curve of what happens.
#include <algorithm>

#include "cache/entry_store.hpp"

namespace kvo {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

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
