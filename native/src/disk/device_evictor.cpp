#include "disk/device_evictor.hpp"

#include <algorithm>
#include <utility>

namespace kvo {
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
