#include "disk/mover.hpp"

#include <algorithm>
#include <memory>
#include <utility>

namespace kvo {
namespace {

constexpr std::uint64_t kPartBytes = std::uint64_t{4} << 20;

}  // namespace

Mover::Mover(std::vector<FooterEntry> entries, Give get, Give put, Give remove, std::function<Instant()> deadline)
    : entries_(std::move(entries)),
      get_(std::move(get)),
      put_(std::move(put)),
      remove_(std::move(remove)),
      deadline_(std::move(deadline)) {}

bool Mover::step() {
    if (batch_ && !batch_->has_ended()) {
        return false;
    }
    if (batch_ && batch_->verb == DiskVerb::get) {
        begin_put();
        if (batch_) {
            return false;
        }
    }
    batch_ = nullptr;
    if (next_ == entries_.size()) {
        memory_ = nullptr;
        return true;
    }
    begin_get();
    return false;
}

void Mover::begin_get() {
    const std::size_t first = next_;
    const bool is_removal = entries_[first].flag == RecordFlag::removal;
    std::uint64_t bytes = 0;
    while (next_ < entries_.size() && (entries_[next_].flag == RecordFlag::removal) == is_removal &&
           (next_ == first || bytes + entries_[next_].length <= kPartBytes)) {
        bytes += entries_[next_++].length;
    }
    Result<AlignedMemory> made = AlignedMemory::create(std::max<std::uint64_t>(bytes, 1));
    if (!made.ok()) {
        return;
    }
    memory_ = std::make_shared<AlignedMemory>(std::move(made.value()));
    auto batch = std::make_shared<DiskBatch>(is_removal ? DiskVerb::remove : DiskVerb::get, next_ - first, deadline_());
    batch->is_move = true;
    std::uint64_t at = 0;
    for (std::size_t i = first; i < next_; ++i) {
        DiskItem& item = batch->item(i - first);
        item.key = entries_[i].key;
        item.length = entries_[i].length;
        item.address = memory_->start() + at;
        at += item.length;
    }
    batch->on_end = [memory = memory_] {};  // the memory lives as long as a thread may still copy to it
    batch_ = batch;
    (is_removal ? remove_ : get_)(batch);
}

void Mover::begin_put() {
    std::vector<const DiskItem*> found;
    for (std::size_t i = 0; i < batch_->size(); ++i) {
        if (batch_->item(i).outcome == DiskOutcome::found) {
            found.push_back(&batch_->item(i));
        }
    }
    if (found.empty()) {
        batch_ = nullptr;
        return;
    }
    auto batch = std::make_shared<DiskBatch>(DiskVerb::put, found.size(), deadline_());
    batch->is_move = true;
    for (std::size_t i = 0; i < found.size(); ++i) {
        DiskItem& item = batch->item(i);
        item.key = found[i]->key;
        item.parent = found[i]->parent;
        item.length = found[i]->length;
        item.digest = found[i]->digest;
        item.address = found[i]->address;
        moved_bytes_ += item.length;
    }
    batch->on_end = [memory = memory_] {};
    batch_ = batch;
    put_(batch);
}

}  // namespace kvo
