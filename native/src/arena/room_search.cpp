#include "arena/room_search.hpp"

#include <algorithm>
#include <numeric>

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

}  // namespace kvo
