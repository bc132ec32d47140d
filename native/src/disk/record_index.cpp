#include "disk/record_index.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvo {
namespace {

constexpr std::size_t kFirstBuckets = 1024;

}  // namespace

KeyMark mark_of(const RecordKey& key) {
    KeyMark mark;
    mark.first = finish(RunDigest{}, name_of(key), 0);
    std::memcpy(&mark.second, key.block_hash.data(), sizeof mark.second);
    return mark;
}

RecordIndex::RecordIndex(std::uint32_t segment_count) : buckets_(kFirstBuckets, kNone), segments_(segment_count) {}

RecordPlace RecordIndex::place_of(const Entry& entry) {
    return {entry.segment, entry.offset_units * kRecordAlignment, entry.length, entry.coded_length};
}

std::uint32_t& RecordIndex::bucket_of(const KeyMark& mark) { return buckets_[mark.first & (buckets_.size() - 1)]; }

std::uint32_t RecordIndex::find_entry(const KeyMark& mark) const {
    std::uint32_t number = buckets_[mark.first & (buckets_.size() - 1)];
    while (number != kNone && !(entries_[number].mark == mark)) {
        number = entries_[number].next_in_bucket;
    }
    return number;
}

std::optional<RecordPlace> RecordIndex::find(const KeyMark& mark) const {
    const std::uint32_t number = find_entry(mark);
    return number == kNone ? std::nullopt : std::optional(place_of(entries_[number]));
}

bool RecordIndex::is_hot(const KeyMark& mark) const {
    const std::uint32_t number = find_entry(mark);
    return number != kNone && entries_[number].is_hot != 0;
}

void RecordIndex::put(const KeyMark& mark, const RecordPlace& place) {
    erase(mark);
    if (size_ == buckets_.size()) {
        grow();
    }
    std::uint32_t number = first_free_;
    if (number == kNone) {
        number = static_cast<std::uint32_t>(entries_.size());
        entries_.emplace_back();
    } else {
        first_free_ = entries_[number].next_in_bucket;
    }
    Entry& entry = entries_[number];
    entry = Entry{};
    entry.mark = mark;
    entry.segment = place.segment & 0x7fffffff;
    entry.offset_units = static_cast<std::uint32_t>(place.offset / kRecordAlignment);
    entry.length = place.length;
    entry.coded_length = place.coded_length;
    std::uint32_t& bucket = bucket_of(mark);
    entry.next_in_bucket = std::exchange(bucket, number);
    link(number);
    ++size_;
}

void RecordIndex::touch(const KeyMark& mark, const RecordPlace& place) {
    const std::uint32_t number = find_entry(mark);
    if (number == kNone || !(place_of(entries_[number]) == place) || entries_[number].is_hot != 0) {
        return;
    }
    entries_[number].is_hot = 1;
    segments_[place.segment].use.hot_bytes += record_footprint(stored_length(place));
}

bool RecordIndex::erase(const KeyMark& mark) {
    const std::uint32_t number = find_entry(mark);
    if (number == kNone) {
        return false;
    }
    free_entry(number);
    return true;
}

bool RecordIndex::erase_at(const KeyMark& mark, const RecordPlace& place) {
    const std::uint32_t number = find_entry(mark);
    if (number == kNone || !(place_of(entries_[number]) == place)) {
        return false;
    }
    free_entry(number);
    return true;
}

std::uint64_t RecordIndex::drop_segment(std::uint32_t segment, std::uint64_t from) {
    std::uint64_t count = 0;
    for (std::uint32_t number = segments_[segment].first; number != kNone;) {
        const std::uint32_t next = entries_[number].next_in_segment;
        if (place_of(entries_[number]).offset >= from) {
            free_entry(number);
            ++count;
        }
        number = next;
    }
    return count;
}

void RecordIndex::clear() { *this = RecordIndex(static_cast<std::uint32_t>(segments_.size())); }

std::uint64_t RecordIndex::memory_bytes() const noexcept {
    return entries_.capacity() * sizeof(Entry) + buckets_.capacity() * sizeof(std::uint32_t) +
           segments_.capacity() * sizeof(SegmentList);
}

void RecordIndex::grow() {
    buckets_.assign(buckets_.size() * 2, kNone);
    for (const SegmentList& list : segments_) {
        for (std::uint32_t number = list.first; number != kNone; number = entries_[number].next_in_segment) {
            std::uint32_t& bucket = bucket_of(entries_[number].mark);
            entries_[number].next_in_bucket = std::exchange(bucket, number);
        }
    }
}

void RecordIndex::link(std::uint32_t number) {
    Entry& entry = entries_[number];
    SegmentList& list = segments_[entry.segment];
    entry.next_in_segment = list.first;
    entry.last_in_segment = kNone;
    if (list.first != kNone) {
        entries_[list.first].last_in_segment = number;
    }
    list.first = number;
    list.use.live_bytes += record_footprint(stored_length(entry));
    live_bytes_ += record_footprint(stored_length(entry));
    ++list.use.records;
}

void RecordIndex::unlink(std::uint32_t number) {
    Entry& entry = entries_[number];
    SegmentList& list = segments_[entry.segment];
    (entry.last_in_segment == kNone ? list.first : entries_[entry.last_in_segment].next_in_segment) =
        entry.next_in_segment;
    if (entry.next_in_segment != kNone) {
        entries_[entry.next_in_segment].last_in_segment = entry.last_in_segment;
    }
    list.use.live_bytes -= record_footprint(stored_length(entry));
    live_bytes_ -= record_footprint(stored_length(entry));
    list.use.hot_bytes -= entry.is_hot != 0 ? record_footprint(stored_length(entry)) : 0;
    --list.use.records;
}

void RecordIndex::free_entry(std::uint32_t number) {
    std::uint32_t* place = &bucket_of(entries_[number].mark);
    while (*place != number) {
        place = &entries_[*place].next_in_bucket;
    }
    *place = entries_[number].next_in_bucket;
    unlink(number);
    entries_[number].next_in_bucket = std::exchange(first_free_, number);
    --size_;
}

}  // namespace kvo
