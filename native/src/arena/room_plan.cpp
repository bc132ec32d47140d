#include "arena/room_plan.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace kvo {
namespace {

constexpr std::size_t kWindowsKept = 32;

// A pool may have millions of extents. When so many have been seen, good windows will do; and then, at `kExtentsSeen`,
// any, or none.
constexpr std::uint64_t kExtentsForGood = 64 * 1024;

constexpr auto kCheaper = [](const Window& left, const Window& right) { return left.live_bytes < right.live_bytes; };

// The cheapest windows so far, a heap with the dearest on top.
class CheapestWindows {
public:
    void offer(const Window& window) {
        if (window.extents == 0) {
            return;
        }
        if (is_full()) {
            if (!kCheaper(window, windows_.front())) {
                return;
            }
            std::ranges::pop_heap(windows_, kCheaper);
            windows_.pop_back();
        }
        windows_.push_back(window);
        std::ranges::push_heap(windows_, kCheaper);
    }

    bool is_full() const { return windows_.size() == kWindowsKept; }

    bool has_any_below(std::uint64_t bytes) const {
        return std::ranges::any_of(windows_, [&](const Window& window) { return window.live_bytes <= bytes; });
    }

    std::vector<Window> sorted() && {
        std::ranges::sort_heap(windows_, kCheaper);
        return std::move(windows_);
    }

private:
    std::vector<Window> windows_;
};

// Costs what no sum of record bytes reaches, and sums of it still fit into 64 bits.
constexpr std::uint64_t kBarred = 1ULL << 50;

// The same for all spans of a size.
struct SpanCost {
    std::uint64_t per_record = 0;
    // Cost of a span that is as long as the wanted run and whose records do not fit into holes of other spans: finding
    // a place for them would be just as hard.
    std::uint64_t barred = 0;
};

std::vector<SpanCost> span_costs(const SpanTable& spans, std::uint32_t extents) {
    std::vector<SpanCost> costs;
    for (std::size_t number = 0; number < spans.class_count(); ++number) {
        const SizeClass& size = spans.size_class(static_cast<ClassNumber>(number));
        const bool is_barred = size.shape.extents >= extents && size.holes < size.shape.slots;
        costs.push_back({size.slot_bytes, is_barred ? kBarred : 0});
    }
    return costs;
}

// A free run, a span, or what of a segment is not there yet.
struct Item {
    ExtentNumber first = 0;
    std::uint64_t bytes = 0;
};

void list_items(const SpanTable& spans, const FreeRuns& runs, const std::vector<SpanCost>& costs, ExtentNumber begin,
                ExtentNumber end, std::vector<Item>& items) {
    items.clear();
    auto run = runs.by_place().lower_bound(begin);
    ExtentNumber next_free = run == runs.by_place().end() ? end : run->first;
    // Extent by extent, though most begin nothing where spans are long: a walk that waits for each span's length is
    // slower.
    const ExtentNumber there = std::min(end, spans.extent_count());
    for (ExtentNumber at = begin; at < there; ++at) {
        if (const SpanMark mark = spans.mark_of(at); mark.is_span) {
            const SpanCost& cost = costs[mark.number];
            items.push_back({at, mark.is_draining ? kBarred : cost.barred + mark.live * cost.per_record});
        } else if (at == next_free) {
            items.push_back({at, 0});
            ++run;
            next_free = run == runs.by_place().end() ? end : run->first;
        }
    }
    if (there < end) {
        items.push_back({there, kBarred});
    }
}

// Slides a window from item to item: the best place for it always begins where a span or a free run begins.
void search_items(const std::vector<Item>& items, const RoomQuestion& question, ExtentNumber end,
                  CheapestWindows& cheapest) {
    Window best{.live_bytes = question.bytes_limit + 1};
    ExtentNumber stretch_end = items.front().first + question.extents;
    std::size_t next = 0;
    std::uint64_t bytes = 0;
    for (const Item& item : items) {
        if (std::uint64_t{item.first} + question.extents > end) {
            break;
        }
        for (; next < items.size() && items[next].first < item.first + question.extents; ++next) {
            bytes += items[next].bytes;
        }
        // One window of each stretch, else all that are kept would overlap and fail by the same span.
        if (item.first >= stretch_end) {
            cheapest.offer(best);
            best = {.live_bytes = question.bytes_limit + 1};
            stretch_end = item.first + question.extents;
        }
        if (bytes < best.live_bytes) {
            best = {item.first, question.extents, bytes};
        }
        bytes -= item.bytes;
    }
    cheapest.offer(best);
}

// The same for each cell of the segment's grid. A window begins where the item does that reaches into its cell.
void search_cells(const std::vector<Item>& items, const RoomQuestion& question, ExtentNumber end,
                  CheapestWindows& cheapest) {
    std::size_t first = 0;
    const std::uint32_t rest = question.extents_per_segment % question.extents;
    for (std::uint64_t cell = items.front().first + rest; cell < end; cell += question.extents) {
        while (first + 1 < items.size() && items[first + 1].first <= cell) {
            ++first;
        }
        std::uint64_t bytes = 0;
        for (std::size_t i = first; i < items.size() && items[i].first < cell + question.extents; ++i) {
            bytes += items[i].bytes;
        }
        if (bytes <= question.bytes_limit) {
            const auto extents = static_cast<std::uint32_t>(cell + question.extents - items[first].first);
            cheapest.offer({items[first].first, extents, bytes});
        }
    }
}

}  // namespace

std::vector<Window> cheapest_windows(const SpanTable& spans, const FreeRuns& runs, const RoomQuestion& question) {
    std::vector<std::uint32_t> segments(spans.segment_count());
    std::iota(segments.begin(), segments.end(), 0);
    std::ranges::sort(segments, {}, [&](std::uint32_t segment) { return spans.segment_live_bytes(segment); });
    const std::vector<SpanCost> costs = span_costs(spans, question.extents);
    std::vector<Item> items;
    CheapestWindows cheapest;
    std::uint64_t seen = 0;
    for (const std::uint32_t segment : segments) {
        const ExtentNumber begin = segment * question.extents_per_segment;
        const ExtentNumber end = begin + question.extents_per_segment;
        list_items(spans, runs, costs, begin, end, items);
        if (items.empty()) {  // a withdrawn segment without records has neither spans nor free runs
            continue;
        }
        if (question.is_on_grid) {
            search_cells(items, question, end, cheapest);
        } else {
            search_items(items, question, end, cheapest);
        }
        seen += question.extents_per_segment;
        if (seen >= kExtentsSeen || (seen >= kExtentsForGood && cheapest.has_any_below(question.bytes_enough))) {
            break;
        }
    }
    return std::move(cheapest).sorted();
}

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
