#include "cache/departures.hpp"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

namespace kvo {
namespace {

constexpr std::uint64_t kWhyMask = 3;
constexpr std::size_t kRowsOfSet = 4;

// Names are hashes, but of one space their other bits may all be alike.
constexpr std::uint64_t mix(std::uint64_t name) {
    name ^= name >> 32;
    name *= 0x9e3779b97f4a7c15;
    return name ^ (name >> 32);
}

constexpr std::uint32_t row_tag_of(std::uint64_t mixed) { return static_cast<std::uint32_t>(mixed >> 32); }

}  // namespace

Departures::Departures(std::size_t limit) {
    const std::size_t count = std::bit_ceil(std::max(limit, kRowsOfSet)) / kRowsOfSet;
    Result<AlignedMemory> memory = AlignedMemory::create(count * sizeof(Set));
    if (memory.ok()) {
        memory_ = std::move(memory.value());
        sets_ = {reinterpret_cast<Set*>(memory_.start()), count};  // all zeros: no row
    }
}

void Departures::prefetch(std::uint64_t name) const {
    if (!sets_.empty()) {
        __builtin_prefetch(&sets_[mix(name) & (sets_.size() - 1)], 1);
    }
}

void Departures::add(std::uint64_t name, const Departure& departure) {
    if (sets_.empty()) {
        return;
    }
    const std::uint64_t mixed = mix(name);
    Set& set = sets_[mixed & (sets_.size() - 1)];
    Row* chosen = set.rows.data();
    for (Row& row : set.rows) {
        if (row.bytes_and_why != 0 && row.tag == row_tag_of(mixed)) {
            chosen = &row;
            break;
        }
        if (row.bytes_and_why < chosen->bytes_and_why) {
            chosen = &row;  // empty, or of earlier
        }
    }
    *chosen = {row_tag_of(mixed), departure.second,
               departure.evicted_bytes << 2 | static_cast<std::uint64_t>(departure.why)};
}

std::optional<Departure> Departures::find(std::uint64_t name) const {
    if (sets_.empty()) {
        return std::nullopt;
    }
    const std::uint64_t mixed = mix(name);
    for (const Row& row : sets_[mixed & (sets_.size() - 1)].rows) {
        if (row.bytes_and_why != 0 && row.tag == row_tag_of(mixed)) {
            return Departure{static_cast<Leaving>(row.bytes_and_why & kWhyMask), row.second, row.bytes_and_why >> 2};
        }
    }
    return std::nullopt;
}

void RemovedLog::watch(bool is_wanted) {
    std::deque<RemovedBlock> unwanted;  // ends without the lock
    const std::lock_guard lock(mutex_);
    if (!is_wanted) {
        blocks_.swap(unwanted);
        lost_ = 0;
    }
    is_wanted_.store(is_wanted, std::memory_order_release);
}

void RemovedLog::add(RemovedBlock block) {
    if (!is_wanted()) {
        return;
    }
    const std::lock_guard lock(mutex_);
    if (!is_wanted()) {
        return;
    }
    if (blocks_.size() >= limit_) {
        lost_ += 1;
        return;
    }
    try {
        blocks_.push_back(block);
    } catch (const std::bad_alloc&) {
        lost_ += 1;
    }
}

RemovedLog::Taken RemovedLog::take(std::size_t count) {
    const std::lock_guard lock(mutex_);
    Taken taken;
    const auto end = blocks_.begin() + static_cast<std::ptrdiff_t>(std::min(count, blocks_.size()));
    taken.blocks.assign(blocks_.begin(), end);
    blocks_.erase(blocks_.begin(), end);
    taken.lost = std::exchange(lost_, 0);
    taken.is_all = blocks_.empty();
    return taken;
}

}  // namespace kvo
