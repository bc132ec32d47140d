#include "arena/arena.hpp"

#include <algorithm>
#include <cassert>
#include <string>

#include "arena/room_plan.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t kSectorBytes = 512;
constexpr std::uint64_t kMaxExtents = 1ULL << 31;  // 2 PiB of 1 MiB extents
constexpr std::size_t kMaxClasses = 4096;

// A refused plan is worth another try when this part of a span is free that was not; or, as records that were in use or
// in the way may be gone though nothing more is free, when so much was freed that the look over the pool costs each of
// those records little.
constexpr std::uint64_t kRetriesPerSpan = 8;
constexpr std::uint64_t kSeenPerFreed = 64;

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
    free_bytes_ += static_cast<std::int64_t>(count * shape_.extent_bytes);
    return {};
}

void Arena::withdraw(std::uint32_t segment) { pool_.withdraw(segment * pool_.extents_per_segment); }

void Arena::cut_withdrawn() {
    if (pool_.has_withdrawn()) {
        free_bytes_ -= static_cast<std::int64_t>(pool_.cut() * shape_.extent_bytes);
    }
}

void Arena::restore_withdrawn() {
    if (pool_.has_withdrawn()) {
        pool_.restore();
    }
}

std::optional<Arena::WithdrawnSpan> Arena::find_withdrawn(ExtentNumber& from) const {
    from = std::max(from, pool_.withdrawn);
    while (from < pool_.spans.extent_count() && !pool_.spans.is_span(from)) {
        ++from;
    }
    if (from >= pool_.spans.extent_count()) {
        return std::nullopt;
    }
    WithdrawnSpan found{.number = pool_.spans.mark_of(from).number, .records = {}};
    pool_.spans.for_each_live(from, [&](Slot slot, EntryNumber owner) {
        found.records.emplace_back(slot, owner);
        return true;
    });
    return found;
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
        refusals_.emplace_back();
        return number;
    }
    const std::optional<ClassNumber> unused = pool_.spans.find_unused_class();
    if (!unused) {
        return Status(Code::unavailable, "the pool serves 4096 record sizes already");
    }
    classes_.erase(pool_.spans.size_class(*unused).record_bytes);
    pool_.spans.change_class(*unused, record_bytes, slot_bytes, span);
    classes_.emplace(record_bytes, *unused);
    refusals_[*unused].reset();
    return *unused;
}

std::optional<Slot> Arena::allocate(ClassNumber number, EntryNumber owner) {
    assert(owner != kNoEntry);
    const std::optional<Slot> slot = pool_.allocate(number, owner);
    if (slot) {
        free_bytes_ -= static_cast<std::int64_t>(size_class(number).slot_bytes);
    } else if (auto& refusal = refusals_[number]; refusal) {
        // Bytes that were free when the plan was refused may have been taken since. So bytes freed from now on count as
        // new.
        refusal->free_bytes = std::min(refusal->free_bytes, free_bytes_ + retry_bytes(number));
    }
    return slot;
}

void Arena::free(Slot slot) {
    const std::uint64_t bytes = pool_.spans.size_of(slot.span).slot_bytes;
    freed_bytes_ += bytes;
    free_bytes_ += static_cast<std::int64_t>(bytes);
    pool_.release(slot);
}

Claim Arena::claim(ClassNumber number, Slot slot, EntryNumber owner) {
    const Claim outcome = pool_.claim(number, slot, owner);
    free_bytes_ -= outcome == Claim::granted ? static_cast<std::int64_t>(size_class(number).slot_bytes) : 0;
    return outcome;
}

bool Arena::can_make_room(ClassNumber number) const noexcept {
    const auto& refusal = refusals_[number];
    const bool is_worth_a_look = !refusal || free_bytes_ >= refusal->free_bytes || freed_bytes_ >= refusal->freed_bytes;
    return is_worth_a_look && pool_.runs.total() + pool_.spans.spare_extents() >= size_class(number).shape.extents;
}

std::optional<RoomPlan> Arena::plan_room(ClassNumber number, const std::function<bool(EntryNumber)>& is_movable) {
    const SpanShape shape = size_class(number).shape;
    if (size_class(number).holes != 0 || pool_.runs.longest() >= shape.extents) {
        return RoomPlan{};
    }
    RoomPlan plan = RoomPlanner(pool_, shape_.extent_bytes, is_movable).plan(number);
    if (plan.moves.empty()) {
        const std::int64_t part = retry_bytes(number);
        const std::uint64_t seen = std::min(pool_.spans.extent_count(), kExtentsSeen) * shape_.extent_bytes;
        refusals_[number] = {
            .free_bytes = free_bytes_ + part,
            .freed_bytes = freed_bytes_ + std::max(static_cast<std::uint64_t>(part), seen / kSeenPerFreed)};
        return std::nullopt;
    }
    return plan;
}

std::int64_t Arena::retry_bytes(ClassNumber number) const noexcept {
    return static_cast<std::int64_t>(size_class(number).shape.extents * shape_.extent_bytes / kRetriesPerSpan);
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
