#include "arena/room_plan.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace kvo {
namespace {

constexpr std::uint64_t kBytesAlwaysAllowed = 64ULL << 20;

}  // namespace

RoomPlan RoomPlanner::plan(ClassNumber number) {
    const SpanShape shape = pool_.spans.size_class(number).shape;
    const std::uint32_t extents = shape.extents;
    const std::uint64_t span_bytes = extents * extent_bytes_;
    bytes_limit_ = std::max(2 * span_bytes, kBytesAlwaysAllowed);
    if (extents > 1) {
        RoomQuestion question{.extents = extents,
                              .extents_per_segment = pool_.extents_per_segment,
                              .bytes_limit = bytes_limit_,
                              .bytes_enough = span_bytes / 2,
                              .is_on_grid = shape.is_one_record()};
        if (empty_any(question)) {
            return std::move(plan_);
        }
        // No cell can be had, because of records in use: then anywhere.
        if (std::exchange(question.is_on_grid, false) && empty_any(question)) {
            return std::move(plan_);
        }
    }
    if (pool_.runs.total() < extents) {
        gather(extents);
    }
    return std::move(plan_);
}

bool RoomPlanner::empty_any(const RoomQuestion& question) {
    const std::vector<Window> windows = cheapest_windows(pool_.spans, pool_.runs, question);
    return std::ranges::any_of(windows, [this](const Window& window) { return empty_window(window); });
}

// Plans to empty the whole window, or does nothing. Holds the window's free extents, so that no record is moved into
// them.
bool RoomPlanner::empty_window(const Window& window) {
    std::vector<ExtentNumber> touched;
    std::vector<std::pair<ExtentNumber, std::uint32_t>> held;
    std::uint32_t held_extents = 0;
    const ExtentNumber end = window.first + window.extents;
    for (ExtentNumber at = window.first; at < end;) {
        if (!pool_.spans.is_span(at)) {
            held.push_back(*pool_.runs.by_place().find(at));
            held_extents += held.back().second;
            at += held.back().second;
        } else if (is_drainable(at)) {
            touched.push_back(at);
            at += pool_.spans.size_of(at).shape.extents;
        } else {
            return false;
        }
    }
    if (!has_places(touched, pool_.runs.total() - held_extents)) {
        return false;
    }
    for (const auto& [first, length] : held) {
        pool_.runs.take_at(first, length);
    }
    const bool is_emptied = displace(touched);
    for (const auto& [first, length] : held) {
        pool_.runs.give(first, length);
    }
    return is_emptied;
}

// Counts whether other holes and the free extents elsewhere can take all records of these spans. Free extents in
// pieces may still turn out to be too short.
bool RoomPlanner::has_places(const std::vector<ExtentNumber>& touched, std::uint32_t free_elsewhere) const {
    struct Need {
        ClassNumber number = 0;
        std::uint64_t spans = 0;
    };
    std::vector<Need> needs;
    for (const ExtentNumber first : touched) {
        const ClassNumber number = pool_.spans.mark_of(first).number;
        auto need = std::ranges::find(needs, number, &Need::number);
        if (need == needs.end()) {
            need = needs.insert(needs.end(), Need{.number = number});
        }
        ++need->spans;
    }
    std::uint64_t extents = 0;
    for (const Need& need : needs) {
        const SizeClass& size = pool_.spans.size_class(need.number);
        // Whether a slot of these spans is a record, which needs a place, or a hole, which is none, comes to the same.
        const std::uint64_t slots = need.spans * size.shape.slots;
        if (slots > size.holes) {
            extents += (slots - size.holes + size.shape.slots - 1) / size.shape.slots * size.shape.extents;
        }
    }
    return extents <= free_elsewhere;
}

// Frees extents wherever a size has too many holes. All or nothing.
bool RoomPlanner::gather(std::uint32_t extents) {
    std::uint32_t found = pool_.runs.total();
    while (found < extents) {
        std::optional<ExtentNumber> cheapest;
        double cheapest_cost = 0;
        for (std::size_t i = 0; i < pool_.spans.class_count(); ++i) {
            const auto number = static_cast<ClassNumber>(i);
            if (pool_.spans.size_class(number).spare_spans == 0) {
                continue;
            }
            const auto span = pool_.spans.sparsest(number, [&](ExtentNumber first) { return is_drainable(first); });
            if (!span) {
                continue;
            }
            const double cost =
                static_cast<double>(pool_.spans.live_bytes_of(*span)) / pool_.spans.size_of(*span).shape.extents;
            if (!cheapest || cost < cheapest_cost) {
                cheapest = span;
                cheapest_cost = cost;
            }
        }
        if (!cheapest || plan_.bytes + pool_.spans.live_bytes_of(*cheapest) > bytes_limit_) {
            take_back();
            return false;
        }
        found += pool_.spans.size_of(*cheapest).shape.extents;
        if (!displace({*cheapest})) {
            return false;
        }
    }
    return true;
}

bool RoomPlanner::is_drainable(ExtentNumber first) {
    if (!pool_.spans.is_idle(first) || std::ranges::find(pinned_, first) != pinned_.end()) {
        return false;
    }
    const bool is_free_to_go =
        pool_.spans.for_each_live(first, [&](Slot, EntryNumber owner) { return is_movable_(owner); });
    if (!is_free_to_go) {
        pinned_.push_back(first);
    }
    return is_free_to_go;
}

// Finds another place for all records of these spans, or changes nothing.
bool RoomPlanner::displace(const std::vector<ExtentNumber>& touched) {
    for (const ExtentNumber first : touched) {
        pool_.spans.begin_drain(first);
    }
    const bool has_place_for_all = std::ranges::all_of(touched, [&](ExtentNumber first) {
        const ClassNumber number = pool_.spans.mark_of(first).number;
        return pool_.spans.for_each_live(first, [&](Slot from, EntryNumber owner) {
            const std::optional<Slot> to = pool_.allocate(number, owner);
            if (to) {
                pool_.begin_move(from, *to);
                plan_.moves.push_back({owner, from, *to});
                plan_.bytes += pool_.spans.size_class(number).slot_bytes;
            }
            return to.has_value();
        });
    });
    if (!has_place_for_all) {
        take_back();
        for (const ExtentNumber first : touched) {
            pool_.spans.settle(first);
        }
    }
    return has_place_for_all;
}

void RoomPlanner::take_back() {
    for (const Move& move : plan_.moves) {
        pool_.end_move(move.from, move.to, move.to);
    }
    plan_ = {};
}

}  // namespace kvo
