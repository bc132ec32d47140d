// Device: a segment is given up, so that there is one to write to.
#include <algorithm>
#include <utility>

#include "disk/device.hpp"
#include "disk/segment_io.hpp"

namespace kvo {
namespace {

constexpr std::size_t kSpareSegments = 2;
constexpr std::chrono::seconds kMoveTimeout{60};

}  // namespace

void Device::pump_eviction() {
    if (mover_ && mover_->step()) {
        mover_.reset();
    }
    if (leaving_ && !mover_) {
        end_eviction();
    }
    if (!leaving_ && condition_.can_write() && files_.empty_count() < kSpareSegments) {
        begin_eviction();
    }
}

void Device::begin_eviction() {
    std::vector<Candidate> candidates;
    {
        const std::lock_guard hold(index_.lock);
        for (std::uint32_t number = 0; number < files_.table().size(); ++number) {
            if (files_[number].state == SegmentState::full) {
                const SegmentUse& use = index_.index.use(number);
                candidates.push_back({number, files_[number].life.generation, use.live_bytes, use.hot_bytes});
            }
        }
    }
    const std::optional<Candidate> victim = choose_victim(candidates);
    if (!victim) {
        return;
    }
    leaving_ = victim->segment;
    SegmentFile& segment = files_[victim->segment];
    segment.state = SegmentState::leaving;
    std::vector<FooterEntry> kept;
    if (segment.has_footer && (victim->hot_bytes > 0 || segment.removals > 0)) {
        kept = choose_moves(victim->segment);
    }
    if (!kept.empty()) {
        const auto give = [this](const BatchPointer& batch) { add_all(batch); };
        mover_.emplace(std::move(kept), give, give, give, [this] { return terms_.now() + kMoveTimeout; });
    } else {
        end_eviction();
    }
}

// Of a segment's records those that were read since they were written, as far as they may be written again; and what
// says that records of older segments are gone.
std::vector<FooterEntry> Device::choose_moves(std::uint32_t number) {
    const SegmentFile& segment = files_[number];
    const std::optional<std::vector<FooterEntry>> entries =
        SegmentIo(terms_, runner_, files_, counts_).find_entries(number);
    if (!entries || !condition_.can_write()) {
        return {};
    }
    const bool has_older = std::ranges::any_of(files_.table(), [&segment](const SegmentFile& other) {
        return other.state == SegmentState::full && other.life.generation < segment.life.generation;
    });
    std::vector<FooterEntry> kept;
    const std::lock_guard hold(index_.lock);
    for (const FooterEntry& entry : *entries) {
        const KeyMark mark = mark_of(entry.key);
        if (entry.flag == RecordFlag::removal) {
            if (has_older && !index_.index.find(mark)) {
                kept.push_back(entry);
            }
            continue;
        }
        const RecordPlace place = place_of(number, entry);
        if (index_.index.find(mark) == place && index_.index.is_hot(mark) &&
            moves_allowed_.take(record_footprint(stored_length(entry)))) {
            kept.push_back(entry);
        }
    }
    return kept;
}

// The segment is empty when the last read of it has ended.
void Device::end_eviction() {
    SegmentFile& segment = files_[*leaving_];
    {
        const std::lock_guard hold(index_.lock);
        const std::uint64_t dropped = index_.index.drop_segment(*leaving_);
        counts_.evicted_records += dropped;
    }
    if (segment.readers == 0) {
        segment.state = SegmentState::empty;
        segment.life = {};
        ++counts_.evicted_segments;
        leaving_.reset();
    }
}

}  // namespace kvo
