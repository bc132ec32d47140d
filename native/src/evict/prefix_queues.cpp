#include "evict/prefix_queues.hpp"

namespace kvo {

PrefixQueues::PrefixQueues(PrefixNodes& nodes) : nodes_(nodes), ranks_(kLists) {
    for (std::size_t list = 0; list < lists_.size(); ++list) {
        lists_[list] = {end_of(list), end_of(list)};
    }
}

// A list is a ring through its ends.
EntryNumber& PrefixQueues::newer_of(EntryNumber link) noexcept {
    return link >= kFirstEnd ? lists_[link - kFirstEnd].oldest : nodes_[link].newer;
}

EntryNumber& PrefixQueues::older_of(EntryNumber link) noexcept {
    return link >= kFirstEnd ? lists_[link - kFirstEnd].newest : nodes_[link].older;
}

void PrefixQueues::link(EntryNumber entry, std::size_t list, QueueEnd end) noexcept {
    const EntryNumber older = end == QueueEnd::newest ? lists_[list].newest : end_of(list);
    const EntryNumber newer = end == QueueEnd::newest ? end_of(list) : lists_[list].oldest;
    PrefixNode& node = nodes_[entry];
    node.older = older;
    node.newer = newer;
    node.is_queued = 1;
    newer_of(older) = entry;
    older_of(newer) = entry;
}

void PrefixQueues::push(EntryNumber entry, EntryClass kind, std::size_t slot, QueueEnd end) noexcept {
    const std::size_t row = row_of(kind, nodes_[entry].is_in_tier != 0);
    const std::size_t list = list_of(row, slot);
    link(entry, list, end);
    if (!is_seen_[row]) {
        is_seen_[row] = true;
        is_ranked_ = false;
    }
    if (is_ranked_ && !is_in_heap_[list]) {
        heap_.push_back(ranks_[list]);
        std::push_heap(heap_.begin(), heap_.end());
        is_in_heap_[list] = true;
    }
}

void PrefixQueues::unlink(EntryNumber entry) noexcept {
    PrefixNode& node = nodes_[entry];
    newer_of(node.older) = node.newer;
    older_of(node.newer) = node.older;
    node.is_queued = 0;
}

EntryNumber PrefixQueues::choose() noexcept {
    while (!heap_.empty()) {
        const std::size_t list = heap_.front().list;
        if (const EntryNumber entry = first(list); entry != kNoEntry) {
            return entry;
        }
        std::pop_heap(heap_.begin(), heap_.end());
        heap_.pop_back();
        is_in_heap_[list] = false;
    }
    return first_kept();
}

void PrefixQueues::merge(std::size_t from, std::size_t into) noexcept {
    is_ranked_ = false;
    for (std::size_t row = 0; row < kRows; ++row) {
        const std::size_t source = list_of(row, from);
        if (first(source) == kNoEntry) {
            continue;
        }
        const List moved = lists_[source];
        const EntryNumber end = end_of(list_of(row, into));
        const EntryNumber newest = older_of(end);
        newer_of(newest) = moved.oldest;
        nodes_[moved.oldest].older = newest;
        nodes_[moved.newest].newer = end;
        older_of(end) = moved.newest;
        lists_[source] = {end_of(source), end_of(source)};
    }
}

}  // namespace kvo
