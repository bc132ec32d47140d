#include "replay/belady.hpp"

#include <set>
#include <vector>

namespace kvo {
namespace {

constexpr std::uint32_t kNever = 0xffffffff;

// Returns for each reference the next request with the same block. One request never has a block twice.
std::vector<std::uint32_t> find_next_requests(const ReplayTrace& trace) {
    std::vector<std::uint32_t> next(trace.reference_count());
    std::vector<std::uint32_t> coming(trace.block_count(), kNever);
    std::size_t reference = trace.reference_count();
    for (std::size_t at = trace.request_count(); at-- > 0;) {
        const auto blocks = trace.request(at);
        for (std::size_t depth = blocks.size(); depth-- > 0;) {
            next[--reference] = coming[blocks[depth]];
            coming[blocks[depth]] = static_cast<std::uint32_t>(at);
        }
    }
    return next;
}

class OptimalCache {
public:
    OptimalCache(std::size_t block_count, std::uint64_t capacity) : next_(block_count, kNever), capacity_(capacity) {}

    bool holds(BlockNumber block) const { return next_[block] != kNever; }

    // `next` is the block's next request from now on.
    void keep_if_best(BlockNumber block, std::uint32_t next) {
        if (holds(block)) {
            order_.erase(key(block));
        }
        next_[block] = next;
        if (next == kNever) {
            return;
        }
        order_.insert(key(block));
        if (order_.size() > capacity_) {
            const auto last = std::prev(order_.end());
            next_[static_cast<BlockNumber>(*last)] = kNever;
            order_.erase(last);
        }
    }

private:
    // Orders blocks by their next request, and those of one request parents first: parents have lower numbers.
    std::uint64_t key(BlockNumber block) const { return (std::uint64_t{next_[block]} << 32) | block; }

    std::vector<std::uint32_t> next_;  // by block; kNever: not resident
    std::set<std::uint64_t> order_;
    std::uint64_t capacity_;
};

}  // namespace

OptimalHits count_optimal_hits(const ReplayTrace& trace, std::uint64_t capacity_blocks) {
    const std::vector<std::uint32_t> next = find_next_requests(trace);
    OptimalCache cache(trace.block_count(), capacity_blocks);
    OptimalHits found;
    std::size_t reference = 0;
    for (std::size_t at = 0; at < trace.request_count(); ++at) {
        const auto blocks = trace.request(at);
        std::uint64_t boundary = 0;
        while (boundary < blocks.size() && cache.holds(blocks[boundary])) {
            ++boundary;
        }
        found.hits += boundary;
        found.hit_squares += boundary * boundary;
        for (const BlockNumber block : blocks) {
            cache.keep_if_best(block, next[reference++]);
        }
    }
    return found;
}

}  // namespace kvo
