#include "arena/arena.hpp"

#include <algorithm>
#include <cassert>
#include <string>

namespace kvo {
namespace {

constexpr std::uint64_t kSectorBytes = 512;
constexpr std::uint64_t kMaxExtents = 1ULL << 31;  // 2 PiB of 1 MiB extents
constexpr std::size_t kMaxClasses = 4096;

// A refused plan is worth another try when this part of a span has been freed.
constexpr std::uint64_t kRetriesPerSpan = 8;

}  // namespace

Result<Arena> Arena::create(ArenaShape shape) {
    if (shape.extent_bytes == 0 || shape.extent_bytes % kSectorBytes != 0) {
        return Status(Code::invalid,
                      "extent_bytes must be a multiple of 512, it is " + std::to_string(shape.extent_bytes));
    }
    if (shape.segment_bytes == 0 || shape.segment_bytes % shape.extent_bytes != 0 ||
        shape.segment_bytes / shape.extent_bytes > kMaxExtents) {
        return Status(Code::invalid, "segment_bytes must be a multiple of extent_bytes, they are " +
                                         std::to_string(shape.segment_bytes) + " and " +
                                         std::to_string(shape.extent_bytes));
    }
    return Arena(shape);
}

Arena::Arena(ArenaShape shape)
    : shape_(shape), pool_(static_cast<std::uint32_t>(shape.segment_bytes / shape.extent_bytes)) {}

Status Arena::reserve(std::uint64_t extents) {
    if (extents > kMaxExtents) {
        return {Code::invalid, "the pool cannot have more than 2**31 extents"};
    }
    pool_.spans.reserve(static_cast<std::uint32_t>(extents));
    return {};
}

Status Arena::add_extents(std::uint32_t count) {
    if (std::uint64_t{pool_.spans.extent_count()} + count > kMaxExtents) {
        return {Code::invalid, "the pool cannot have more than 2**31 extents"};
    }
    pool_.add_extents(count);
    return {};
}

Result<ClassNumber> Arena::class_for(std::uint64_t record_bytes) {
    if (const auto known = classes_.find(record_bytes); known != classes_.end()) {
        return known->second;
    }
    const std::uint64_t slot_bytes = record_bytes <= shape_.segment_bytes ? slot_bytes_for(record_bytes) : 0;
    const SpanShape span = span_shape(slot_bytes, shape_.extent_bytes, shape_.segment_bytes);
    if (span.extents == 0) {
        return Status(Code::invalid, "a record of " + std::to_string(record_bytes) + " bytes fits no segment of " +
                                         std::to_string(shape_.segment_bytes));
    }
    if (classes_.size() < kMaxClasses) {
        const ClassNumber number = pool_.spans.add_class(record_bytes, slot_bytes, span);
        classes_.emplace(record_bytes, number);
        asks_again_at_.push_back(0);
        return number;
    }
    const std::optional<ClassNumber> unused = pool_.spans.find_unused_class();
    if (!unused) {
        return Status(Code::unavailable, "the pool serves 4096 record sizes already");
    }
    classes_.erase(pool_.spans.size_class(*unused).record_bytes);
    pool_.spans.change_class(*unused, record_bytes, slot_bytes, span);
    classes_.emplace(record_bytes, *unused);
    asks_again_at_[*unused] = 0;
    return *unused;
}

std::optional<Slot> Arena::allocate(ClassNumber number, EntryNumber owner) {
    assert(owner != kNoEntry);
    return pool_.allocate(number, owner);
}

void Arena::free(Slot slot) {
    freed_bytes_ += pool_.spans.size_of(slot.span).slot_bytes;
    pool_.release(slot);
}

Claim Arena::claim(ClassNumber number, Slot slot, EntryNumber owner) { return pool_.claim(number, slot, owner); }

bool Arena::can_make_room(ClassNumber number) const noexcept {
    return freed_bytes_ >= asks_again_at_[number] &&
           pool_.runs.total() + pool_.spans.spare_extents() >= size_class(number).shape.extents;
}

std::optional<RoomPlan> Arena::plan_room(ClassNumber number, const std::function<bool(EntryNumber)>& is_movable) {
    const SpanShape shape = size_class(number).shape;
    if (size_class(number).holes != 0 || pool_.runs.longest() >= shape.extents) {
        return RoomPlan{};
    }
    RoomPlan plan = RoomPlanner(pool_, shape_.extent_bytes, is_movable).plan(number);
    if (plan.moves.empty()) {
        asks_again_at_[number] = freed_bytes_ + shape.extents * shape_.extent_bytes / kRetriesPerSpan;
        return std::nullopt;
    }
    return plan;
}

void Arena::finish_move(const Move& move) {
    ++moved_records_;
    moved_bytes_ += pool_.spans.size_of(move.from.span).record_bytes;
    pool_.end_move(move.from, move.to, move.from);
}

void Arena::cancel_move(const Move& move) { pool_.end_move(move.from, move.to, move.to); }

SlotPlace Arena::place(Slot slot) const noexcept {
    const std::uint64_t address = slot_address(slot, shape_.extent_bytes, pool_.spans.size_of(slot.span).slot_bytes);
    return {static_cast<std::uint32_t>(address / shape_.segment_bytes), address % shape_.segment_bytes};
}

ArenaStats Arena::stats() const {
    ArenaStats stats{.capacity_bytes = pool_.spans.extent_count() * shape_.extent_bytes,
                     .free_extents = pool_.runs.total(),
                     .longest_free_run = pool_.runs.longest(),
                     .moved_records = moved_records_,
                     .moved_bytes = moved_bytes_};
    for (std::size_t i = 0; i < class_count(); ++i) {
        const SizeClass& size = size_class(static_cast<ClassNumber>(i));
        stats.live_records += size.live;
        stats.live_record_bytes += size.live * size.record_bytes;
        stats.live_slot_bytes += size.live * size.slot_bytes;
        stats.spans += size.spans;
        stats.hole_bytes += size.holes * size.slot_bytes;
    }
    return stats;
}

}  // namespace kvo
