#include "disk/device_evictor.hpp"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

namespace kvo {
namespace {

constexpr std::uint64_t kHotWeight = 4;

}  // namespace

std::optional<Candidate> choose_victim(std::span<Candidate> candidates) {
    if (candidates.empty()) {
        return std::nullopt;
    }
    std::ranges::sort(candidates, {}, &Candidate::generation);
    const auto older = candidates.first((candidates.size() + 1) / 2);
    const std::uint64_t newest = candidates.back().generation;
    return *std::ranges::min_element(older, {}, [newest](const Candidate& one) {
        const auto worth = static_cast<double>(one.live_bytes + (kHotWeight - 1) * one.hot_bytes);
        return std::tuple(worth / static_cast<double>(newest - one.generation + 1), one.generation);
    });
}

void MoveAllowance::add_put(std::uint64_t bytes) {
    left_ = std::min(limit_, left_ + share_ * static_cast<double>(bytes));
}

bool MoveAllowance::take(std::uint64_t bytes) {
    if (static_cast<double>(bytes) > left_) {
        return false;
    }
    left_ -= static_cast<double>(bytes);
    return true;
}

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

namespace {

constexpr std::size_t kSpareSegments = 2;
constexpr std::chrono::seconds kMoveTimeout{60};

}  // namespace

DeviceEvictor::DeviceEvictor(EvictorSeat seat)
    : seat_(std::move(seat)), allowance_(seat_.terms.move_share, seat_.terms.segment_bytes) {}

void DeviceEvictor::pump() {
    if (mover_ && mover_->step()) {
        mover_.reset();
    }
    if (leaving_ && !mover_) {
        end();
    }
    if (!leaving_ && seat_.condition.can_write() && seat_.files.empty_count() < kSpareSegments) {
        begin();
    }
}

void DeviceEvictor::stop() {
    mover_.reset();
    if (leaving_) {
        seat_.files[*std::exchange(leaving_, std::nullopt)].state = SegmentState::full;
    }
}

void DeviceEvictor::begin() {
    std::vector<Candidate> candidates;
    {
        const std::lock_guard hold(seat_.index.lock);
        for (std::uint32_t number = 0; number < seat_.files.table().size(); ++number) {
            if (seat_.files[number].state == SegmentState::full) {
                const SegmentUse& use = seat_.index.index.use(number);
                candidates.push_back({number, seat_.files[number].life.generation, use.live_bytes, use.hot_bytes});
            }
        }
    }
    const std::optional<Candidate> victim = choose_victim(candidates);
    if (!victim) {
        return;
    }
    leaving_ = victim->segment;
    SegmentFile& segment = seat_.files[victim->segment];
    segment.state = SegmentState::leaving;
    std::vector<FooterEntry> kept;
    if (segment.has_footer && (victim->hot_bytes > 0 || segment.removals > 0)) {
        kept = choose_moves(victim->segment);
    }
    if (!kept.empty()) {
        mover_.emplace(std::move(kept), seat_.give, seat_.give, seat_.give,
                       [this] { return seat_.terms.now() + kMoveTimeout; });
    } else {
        end();
    }
}

// Returns the records of a segment to write again: those that were read since they were written, as far as the
// allowance goes, and removals, which say that records of older segments are gone.
std::vector<FooterEntry> DeviceEvictor::choose_moves(std::uint32_t number) {
    const SegmentFile& segment = seat_.files[number];
    const std::optional<std::vector<FooterEntry>> entries = seat_.io.find_entries(number);
    if (!entries || !seat_.condition.can_write()) {
        return {};
    }
    const bool has_older = std::ranges::any_of(seat_.files.table(), [&segment](const SegmentFile& other) {
        return other.state == SegmentState::full && other.life.generation < segment.life.generation;
    });
    std::vector<FooterEntry> kept;
    const std::lock_guard hold(seat_.index.lock);
    for (const FooterEntry& entry : *entries) {
        const KeyMark mark = mark_of(entry.key);
        if (entry.flag == RecordFlag::removal) {
            if (has_older && !seat_.index.index.find(mark)) {
                kept.push_back(entry);
            }
            continue;
        }
        const RecordPlace place = place_of(number, entry);
        if (seat_.index.index.find(mark) == place && seat_.index.index.is_hot(mark) &&
            allowance_.take(record_footprint(stored_length(entry)))) {
            kept.push_back(entry);
        }
    }
    return kept;
}

// The segment is empty when the last read of it has ended.
void DeviceEvictor::end() {
    SegmentFile& segment = seat_.files[*leaving_];
    {
        const std::lock_guard hold(seat_.index.lock);
        const std::uint64_t dropped = seat_.index.index.drop_segment(*leaving_);
        seat_.counts.evicted_records += dropped;
    }
    if (segment.readers == 0) {
        segment.state = SegmentState::empty;
        segment.life = {};
        ++seat_.counts.evicted_segments;
        leaving_.reset();
    }
}

}  // namespace kvo
