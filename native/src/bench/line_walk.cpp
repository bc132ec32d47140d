#include "bench/line_walk.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "bench/cache_load.hpp"

namespace kvo {
namespace {

using Clock = std::chrono::steady_clock;

// A table's buckets have eleven places and are a little more than half full.
constexpr std::uint64_t kEntriesPerBucket = 6;

// 32 bits spread over `count` numbers.
std::uint64_t scale(std::uint64_t bits, std::uint64_t count) { return ((bits & 0xffffffff) * count) >> 32; }

}  // namespace

Result<LineWalk> LineWalk::create(std::uint64_t entries) {
    if (entries == 0 || entries > kEntryLimitMax) {
        return Status(Code::invalid, "an index has 1 to " + std::to_string(kEntryLimitMax) + " entries, not " +
                                         std::to_string(entries));
    }
    const std::uint64_t lines = entries + entries / kEntriesPerBucket + 1;
    SegmentWish wish;
    wish.name = "kvoffload-bench";
    wish.size_bytes = (lines * sizeof(Line) + 4095) / 4096 * 4096;
    auto segment = Segment::create(wish);
    if (!segment.ok()) {
        return segment.fault();
    }
    if (Status status = segment.value().commit_range(0, segment.value().size_bytes()); !status.ok()) {
        return status;
    }
    return LineWalk(std::move(segment.value()), entries);
}

LineWalk::LineWalk(Segment segment, std::uint64_t entries)
    : segment_(std::move(segment)),
      firsts_(reinterpret_cast<First*>(segment_.writable_bytes().data()), entries / kEntriesPerBucket + 1),
      seconds_(reinterpret_cast<Line*>(firsts_.data() + firsts_.size()), entries) {
    for (First& first : firsts_) {
        std::ranges::generate(first.numbers, [&] { return static_cast<std::uint32_t>(scale(random_(), entries)); });
    }
}

Timing LineWalk::walk(std::size_t batches, std::size_t hashes, Second second) {
    std::vector<std::uint8_t> bytes(batches * hashes * kHashBytes);
    make_hashes(random_(), bytes);
    const auto start = Clock::now();
    for (std::size_t i = 0; i < batches; ++i) {
        const auto batch = std::span<const std::uint8_t>(bytes).subspan(i * hashes * kHashBytes, hashes * kHashBytes);
        seen_ += second == Second::read ? walk_batch<Second::read>(batch) : walk_batch<Second::count_up>(batch);
    }
    return {std::chrono::duration<double>(Clock::now() - start).count(), batches * hashes};
}

template <LineWalk::Second second>
std::uint64_t LineWalk::walk_batch(std::span<const std::uint8_t> hashes) {
    constexpr std::size_t kAhead = 32;
    std::array<const std::uint32_t*, kAhead> numbers;
    std::uint64_t seen = 0;
    const std::size_t all = hashes.size() / kHashBytes;
    for (std::size_t begin = 0; begin < all; begin += kAhead) {
        const std::size_t count = std::min(kAhead, all - begin);
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint64_t hash = read_hash(hashes.data() + (begin + i) * kHashBytes)[0];
            numbers[i] = &firsts_[scale(hash, firsts_.size())].numbers[hash >> 60];
            __builtin_prefetch(numbers[i]);
        }
        for (std::size_t i = 0; i < count; ++i) {
            __builtin_prefetch(&seconds_[*numbers[i]], second == Second::count_up ? 1 : 0);
        }
        for (std::size_t i = 0; i < count; ++i) {
            std::atomic<std::uint64_t>& word = seconds_[*numbers[i]].word;
            seen += second == Second::read ? word.load(std::memory_order_relaxed)
                                           : word.fetch_add(1, std::memory_order_relaxed);
        }
    }
    return seen;
}

std::uint64_t LineWalk::count() const {
    std::uint64_t sum = 0;
    for (const Line& line : seconds_) {
        sum += line.word.load(std::memory_order_relaxed);
    }
    return sum;
}

std::uint64_t LineWalk::counted_lines() const {
    return static_cast<std::uint64_t>(
        std::ranges::count_if(seconds_, [](const Line& line) { return line.word.load() != 0; }));
}

}  // namespace kvo
