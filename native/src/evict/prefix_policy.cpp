#include "evict/prefix_policy.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvo {

std::unique_ptr<EvictionPolicy> make_prefix_policy(PolicyBounds bounds) {
    return std::make_unique<PrefixPolicy>(bounds);
}

void PrefixPolicy::expect_admission(std::uint64_t name) const {
    // In a run, only the first block of each home finds its home by its own name. The expected block comes a whole
    // number of homes behind the next one (a commit looks eight blocks ahead), so both have the same place in a home.
    if (run_end_ == kNoEntry || nodes_[run_end_].extra % kHomeBlocks == kHomeBlocks - 1) {
        __builtin_prefetch(ghosts_.address_of(short_name(name) / kHomeBlocks), 1);
    }
}

void PrefixPolicy::admit(const Admission& admission) {
    admitted_count_ += 1;
    admitted_bytes_ += admission.size_bytes;
    count_time(1);
    const EntryNumber entry = admission.entry;
    nodes_.grow_to(entry);
    renew_parity(entry);
    ghosts_.grow_to(++known_count_ * kGhostsPerEntry);

    PrefixNode& node = nodes_[entry];
    const std::uint16_t parity = node.parity;
    node = {};
    node.parity = parity & 1;
    node.name = short_name(admission.name);
    node.epoch = epoch();
    node.reuse = static_cast<std::uint16_t>(admission.reuse) & 3;
    node.needs_state = admission.needs_state;
    node.mark = admission.group & 7;
    hang(entry, admission.parent);
    set_class(node, class_of(admission));
    file(entry, QueueEnd::newest);
}

void PrefixPolicy::touch(std::span<const EntryNumber> entries) {
    count_time(entries.size());
    run_end_ = kNoEntry;
    EntryNumber before = kNoEntry;
    std::uint64_t steps = entries.size() * kStepsToAncestor;
    for (const EntryNumber entry : entries) {
        const PrefixNode& node = nodes_[entry];
        if (before != kNoEntry && (node.parent != before || node.parent_parity != nodes_[before].parity)) {
            adopt(entry, before, steps);
        }
        touch_one(entry);
        before = entry;
    }
}

void PrefixPolicy::touch_one(EntryNumber entry) {
    PrefixNode& node = nodes_[entry];
    const EntryClass kind = node.entry_class();
    const bool was_queued = node.is_queued != 0;
    unfile(entry);
    if (kind < kClassCount) {
        reuse_.count_use(kind, ages_.age_of(node.epoch));
        unfollow(kind, node.epoch);
    }
    node.epoch = epoch();
    if (kind != kNoClass) {
        // An entry without a known parent was taken for useless; this use shows that it is not.
        node.kind = (kind < kClassCount ? class_after_use(kind, draw()) : kEndUsed) & 31;
        follow(node.entry_class(), node.epoch);
    }
    if (was_queued) {
        file(entry, QueueEnd::newest);
    }
}

// Treats the entry as if it had just come: the state that makes it useful is on its way.
void PrefixPolicy::spare(EntryNumber entry) {
    PrefixNode& node = nodes_[entry];
    if (node.kind < kClassCount || node.epoch == epoch()) {
        return;
    }
    const bool was_queued = node.is_queued != 0;
    unfile(entry);
    node.epoch = epoch();
    if (was_queued) {
        file(entry, QueueEnd::newest);
    }
}

void PrefixPolicy::note_tier(EntryNumber entry, bool has) {
    PrefixNode& node = nodes_[entry];
    if ((node.is_in_tier != 0) == has) {
        return;
    }
    node.is_in_tier = has;
    refile(entry);
}

EntryNumber PrefixPolicy::choose_victim() {
    if (!queues_.is_ranked()) {
        rank();
    }
    EntryNumber victim = queues_.choose();
    while (victim != kNoEntry && nodes_[victim].epoch != epoch() && is_growing(victim)) {
        spare(victim);
        victim = queues_.choose();
    }
    return victim == kNoEntry && known_count_ > 0 ? find_stranded() : victim;
}

// Finds an entry to evict when the queues have none. A state counts the windows it needs along its path to the root. If
// that path is a different one when the state goes, a window may look needed for ever; it is found here.
EntryNumber PrefixPolicy::find_stranded() const noexcept {
    for (EntryNumber entry = 0; entry < nodes_.size(); ++entry) {
        const PrefixNode& node = nodes_[entry];
        if (node.is_known() && (!node.is(Reuse::prefix) || node.older == 0)) {
            return entry;
        }
    }
    return kNoEntry;
}

EntryNumber PrefixPolicy::expect_victim() const {
    const EntryNumber victim = queues_.expect();
    if (victim != kNoEntry) {
        __builtin_prefetch(ghosts_.address_of(home_of(nodes_[victim])), 1);
    }
    return victim;
}

void PrefixPolicy::keep(EntryNumber entry) {
    unfile(entry);
    queues_.push_kept(entry);
    nodes_[entry].is_held = 1;
}

void PrefixPolicy::remove(EntryNumber entry, bool was_evicted) {
    PrefixNode& node = nodes_[entry];
    const bool was_end = node.is(Reuse::window) || (node.is(Reuse::prefix) && node.kind == kNoClass);
    if (was_evicted) {
        remember(node);
    } else {
        lose(node);
    }
    unfile(entry);
    if (node.is(Reuse::exact)) {
        withdraw_state(entry);
    } else if (node.is(Reuse::window)) {
        end_boundary(entry);
    } else if (node.is(Reuse::prefix) && node.is_queued == 0 && node.older > 0) {
        orphan_children(entry);
    }
    if (const EntryNumber parent = unhang(entry); parent != kNoEntry) {
        if (was_end) {
            lose(nodes_[parent]);
        }
        file(parent, QueueEnd::oldest);
    }
    node.reuse = PrefixNode::kNotKnown;
    known_count_ -= 1;
    run_end_ = run_end_ == entry ? kNoEntry : run_end_;
}

// --- classes and queues

EntryClass PrefixPolicy::class_of(const Admission& admission) {
    const EntryNumber parent = nodes_[admission.entry].parent;
    switch (admission.reuse) {
        case Reuse::prefix:
            return admission.needs_state ? kNoClass : prefix_class(admission);
        case Reuse::window:
            note_window(admission.window_blocks);
            window_blocks_[admission.group & 7] = admission.window_blocks;
            if (parent != kNoEntry && nodes_[parent].needs_state != 0) {
                return kNoClass;
            }
            return parent == kNoEntry ? kUseless : window_class(admission);
        case Reuse::exact:
            return parent == kNoEntry ? kUseless : state_class(admission);
    }
    return kNoClass;
}

EntryClass PrefixPolicy::prefix_class(const Admission& admission) {
    const EntryNumber before = std::exchange(run_end_, admission.entry);
    PrefixNode& node = nodes_[admission.entry];
    const std::uint32_t above = node.parent == kNoEntry ? kHomeBlocks - 1 : nodes_[node.parent].extra;
    node.extra = above % kHomeBlocks == kHomeBlocks - 1 ? node.name - node.name % kHomeBlocks : above + 1;
    const EntryClass remembered = recall(node);
    if (remembered != kNoClass) {
        run_blocks_ = 0;
        return remembered;
    }
    run_blocks_ = before != kNoEntry && before == admission.parent ? run_blocks_ + 1 : 1;
    if (run_blocks_ == 1) {
        run_class_ = node.parent == kNoEntry ? kPrefixFresh : run_class(nodes_[node.parent].entry_class());
    }
    return kvo::prefix_class(run_class_, run_blocks_);
}

// A window that is so far behind the run's end that no boundary at the end needs it was passed.
EntryClass PrefixPolicy::window_class(const Admission& admission) {
    hold_window_before(admission.entry);
    const PrefixNode& block = nodes_[nodes_[admission.entry].parent];
    const bool goes_on = window_count_ > 0 && block.parent == last_window_block_;
    window_count_ = goes_on ? window_count_ + 1 : 1;
    last_window_block_ = nodes_[admission.entry].parent;
    const std::size_t reach = admission.window_blocks;
    if (reach < window_run_.size() && window_count_ > reach) {
        const EntryNumber passed = window_run_[(window_count_ - reach) % window_run_.size()];
        if (nodes_[passed].is(Reuse::window)) {
            pass(passed);
        }
    }
    window_run_[window_count_ % window_run_.size()] = admission.entry;
    const EntryClass remembered = recall(nodes_[admission.entry]);
    if (remembered != kNoClass) {
        return remembered;
    }
    return static_cast<EntryClass>(kEndFresh + (block.kind < kPrefixBehind ? block.kind / 2 : 0));
}

EntryClass PrefixPolicy::state_class(const Admission& admission) {
    const EntryNumber before = std::exchange(run_end_, admission.entry);
    const PassedState passed = announce_state(admission.entry);
    run_blocks_ = passed.state != kNoEntry && passed.state == before ? run_blocks_ + passed.blocks : passed.blocks;
    const EntryClass remembered = recall(nodes_[admission.entry]);
    return remembered != kNoClass ? remembered : kEndFresh + coarse_step(run_blocks_);
}

void PrefixPolicy::set_class(PrefixNode& node, EntryClass kind) noexcept {
    if (node.kind < kClassCount) {
        unfollow(node.entry_class(), node.epoch);
    }
    node.kind = kind & 31;
    if (kind < kClassCount) {
        follow(kind, node.epoch);
    }
}

// Stops following the entry: its class counts a loss, and the entry has no class any more.
void PrefixPolicy::lose(PrefixNode& node) noexcept {
    if (node.kind < kClassCount) {
        reuse_.count_loss(node.entry_class(), ages_.age_of(node.epoch));
        set_class(node, kNoClass);
    }
}

void PrefixPolicy::pass(EntryNumber entry) noexcept {
    PrefixNode& node = nodes_[entry];
    if (node.kind < kClassCount && node.kind < kPassed) {
        set_class(node, class_when_passed(node.entry_class()));
        refile(entry);
    }
    if (node.is_held_back()) {
        node.is_held = 0;
        file(entry, QueueEnd::newest);
    }
}

// Queues an entry, unless other entries hang on it or need it. An entry without a class joins the useless ones.
void PrefixPolicy::file(EntryNumber entry, QueueEnd end) noexcept {
    const PrefixNode& node = nodes_[entry];
    const bool has_children = node.is(Reuse::prefix) && node.older > 0;
    const bool is_needed = node.is(Reuse::window) && node.kind == kNoClass && nodes_[node.parent].extra > 0;
    if (!has_children && !is_needed && node.is_held == 0) {
        const EntryClass kind = node.kind == kNoClass ? kUseless : node.entry_class();
        queues_.push(entry, kind, ages_.slot_of(node.epoch), end);
    }
}

void PrefixPolicy::unfile(EntryNumber entry) noexcept {
    PrefixNode& node = nodes_[entry];
    if (node.is_queued != 0) {
        queues_.unlink(entry);
        node.is_held = 0;
        node.older = 0;
        node.newer = kNoEntry;
    }
}

// Moves an entry to the queue of its class. Kept and useless entries stay where they are.
void PrefixPolicy::refile(EntryNumber entry) noexcept {
    if (nodes_[entry].is_queued != 0 && nodes_[entry].is_held == 0) {
        unfile(entry);
        file(entry, QueueEnd::newest);
    }
}

// --- time and what is learned in it

void PrefixPolicy::count_time(std::uint64_t entries) {
    counted_since_fade_ += entries;
    while (entries >= epoch_left_) {
        entries -= epoch_left_;
        advance();
        const std::uint64_t mean_bytes =
            std::max<std::uint64_t>(1, admitted_bytes_ / std::max<std::uint64_t>(1, admitted_count_));
        const std::uint64_t resident =
            std::min<std::uint64_t>(bounds_.entry_limit, bounds_.capacity_bytes / mean_bytes);
        epoch_left_ = std::max(kLeastEpoch, resident / kEpochsPerTurnover);
    }
    epoch_left_ -= entries;
}

void PrefixPolicy::advance() {
    ages_.advance([this](std::size_t from, std::size_t into) {
        queues_.merge(from, into);
        for (auto& slots : followed_) {
            slots[into] += std::exchange(slots[from], 0);
        }
    });
    queues_.forget_ranks();
    if (ages_.now() - faded_at_ >= kEpochsPerFade && counted_since_fade_ >= kLeastPerFade) {
        reuse_.fade();
        faded_at_ = ages_.now();
        counted_since_fade_ = 0;
    }
    for (EntryNumber entry = queues_.first_kept(); entry != kNoEntry; entry = queues_.first_kept()) {
        unfile(entry);
        file(entry, QueueEnd::newest);
    }
}

void PrefixPolicy::estimate() {
    estimated_at_ = ages_.now();
    ReuseTable::Grid followed{};
    ages_.each_slot([&](std::size_t slot, std::uint32_t age) {
        for (std::size_t kind = 0; kind < kClassCount; ++kind) {
            followed[kind][AgeBuckets::bucket_of(age)] += followed_[kind][slot];
        }
    });
    reuse_.estimate(followed);
}

double PrefixPolicy::value_of(EntryNumber entry) const {
    const PrefixNode& node = nodes_[entry];
    if (!node.is_known() || node.kind == kUseless) {
        return std::numeric_limits<float>::lowest();
    }
    const std::uint32_t age = ages_.age_of(node.epoch);
    // An entry without a class is worth what depends on it, which was used when it was.
    const EntryClass kind = node.kind == kNoClass ? kEndUsed : node.entry_class();
    if (estimated_at_ != 0) {
        return reuse_.value(kind, age);
    }
    // Nothing is learned before the first eviction. Until then an entry that was used is worth more than others, and of
    // two alike the one whose last use is later.
    const bool was_used = (kind >= kPrefixUsed && kind < kEndFresh) || kind >= kEndUsed;
    return (was_used ? 1.0 : 0.0) - static_cast<double>(age) / 65536;
}

void PrefixPolicy::rank() {
    if (ages_.now() - estimated_at_ >= kEpochsPerEstimate || estimated_at_ == 0) {
        estimate();
    }
    queues_.rank(ages_, [this](EntryClass kind, std::uint32_t age) {
        if (kind == kUseless) {
            // The rest of what it belongs to may be under way.
            return age == 0 ? std::numeric_limits<double>::max() : -1.0;
        }
        return reuse_.value(kind, age);
    });
}

void PrefixPolicy::unfollow(EntryClass kind, std::uint16_t epoch) noexcept {
    std::uint32_t& count = followed_[kind][ages_.slot_of(epoch)];
    count -= count > 0 ? 1 : 0;
}

std::uint32_t PrefixPolicy::home_of(const PrefixNode& node) noexcept {
    return (node.is(Reuse::prefix) ? node.extra : node.name) / kHomeBlocks;
}

// An evicted entry is followed on by name.
void PrefixPolicy::remember(PrefixNode& node) {
    if (node.kind >= kClassCount) {
        return;
    }
    const Ghost gone = ghosts_.add(home_of(node), node.name, node.kind, node.epoch, ages_.now());
    node.kind = kNoClass;
    if (gone.is_found) {
        reuse_.count_loss(gone.kind, ages_.age_of(gone.epoch));
        unfollow(static_cast<EntryClass>(gone.kind), gone.epoch);
    }
}

// The class of a name that comes again; none: it is not remembered.
EntryClass PrefixPolicy::recall(const PrefixNode& node) noexcept {
    const Ghost ghost = ghosts_.take(home_of(node), node.name, ages_.now());
    if (!ghost.is_found) {
        return kNoClass;
    }
    const auto kind = static_cast<EntryClass>(ghost.kind);
    reuse_.count_use(kind, ages_.age_of(ghost.epoch));
    unfollow(kind, ghost.epoch);
    return class_after_use(kind, draw());
}

}  // namespace kvo
