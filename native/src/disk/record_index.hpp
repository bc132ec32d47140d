// Where each record of a device lies: about 60 bytes of memory a record, and none of the disk's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "disk/record_format.hpp"

namespace kvo {

// 128 bits of a key. Two keys that share them are told apart by the record's header when it is read.
struct KeyMark {
    std::uint64_t first = 0;
    std::uint64_t second = 0;

    friend bool operator==(const KeyMark&, const KeyMark&) = default;
};

KeyMark mark_of(const RecordKey& key);

struct RecordPlace {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;  // of the header
    std::uint32_t length = 0;  // of the record
    std::uint32_t coded_length = 0;

    friend bool operator==(const RecordPlace&, const RecordPlace&) = default;
};

inline RecordPlace place_of(std::uint32_t segment, const FooterEntry& entry) {
    return {segment, entry.offset, static_cast<std::uint32_t>(entry.length), entry.coded_length};
}

struct SegmentUse {
    std::uint64_t live_bytes = 0;  // with headers
    std::uint64_t hot_bytes = 0;   // of these, read since they were written
    std::uint64_t records = 0;
};

// For one thread at a time.
class RecordIndex {
public:
    explicit RecordIndex(std::uint32_t segment_count);

    std::optional<RecordPlace> find(const KeyMark& mark) const;
    bool is_hot(const KeyMark& mark) const;

    // In the place of what the mark named before, if it did.
    void put(const KeyMark& mark, const RecordPlace& place);
    void touch(const KeyMark& mark, const RecordPlace& place);  // it was read, if it is still there
    bool erase(const KeyMark& mark);
    bool erase_at(const KeyMark& mark, const RecordPlace& place);  // if it is still there

    // Forgets the segment's records that begin at `from` or behind; how many.
    std::uint64_t drop_segment(std::uint32_t segment, std::uint64_t from = 0);
    void clear();

    const SegmentUse& use(std::uint32_t segment) const { return segments_[segment].use; }
    std::uint64_t size() const noexcept { return size_; }
    std::uint64_t live_bytes() const noexcept { return live_bytes_; }
    std::uint64_t memory_bytes() const noexcept;

private:
    static constexpr std::uint32_t kNone = ~std::uint32_t{0};

    struct Entry {
        KeyMark mark;
        std::uint32_t segment : 31 = 0;
        std::uint32_t is_hot : 1 = 0;
        std::uint32_t offset_units = 0;
        std::uint32_t length = 0;
        std::uint32_t coded_length = 0;
        std::uint32_t next_in_bucket = kNone;
        std::uint32_t next_in_segment = kNone;
        std::uint32_t last_in_segment = kNone;  // the one before it in the segment's list
    };
    static_assert(sizeof(Entry) == 48);

    struct SegmentList {
        SegmentUse use;
        std::uint32_t first = kNone;
    };

    static RecordPlace place_of(const Entry& entry);
    std::uint32_t find_entry(const KeyMark& mark) const;
    std::uint32_t& bucket_of(const KeyMark& mark);
    void grow();
    void link(std::uint32_t number);
    void unlink(std::uint32_t number);
    void free_entry(std::uint32_t number);

    std::vector<Entry> entries_;
    std::vector<std::uint32_t> buckets_;
    std::vector<SegmentList> segments_;
    std::uint32_t first_free_ = kNone;
    std::uint64_t size_ = 0;
    std::uint64_t live_bytes_ = 0;
};

}  // namespace kvo
