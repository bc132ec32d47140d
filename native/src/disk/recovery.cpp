#include "disk/recovery.hpp"

#include <algorithm>
#include <cstring>

#include "codec/record_codec.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t kWindowBytes = std::uint64_t{4} << 20;
constexpr std::uint32_t kMostFailures = 16;  // reads of one segment; each may take the device seconds

// A part of the file in memory, moved along as it is looked at.
class Window {
public:
    Window(const ReadExactly& read, std::uint64_t segment_bytes, std::uint64_t record_limit_bytes)
        : read_(read), segment_bytes_(segment_bytes) {
        const std::uint64_t most = record_footprint(record_limit_bytes) + 2 * kIoAlignment;
        bytes_ = std::min(segment_bytes, std::max(kWindowBytes, round_up(most, kIoAlignment)));
        if (Result<AlignedMemory> made = AlignedMemory::create(bytes_); made.ok()) {
            memory_ = std::move(made.value());
        }
    }
    // These bytes of the file; null: they cannot be had.
    const std::byte* see(std::uint64_t begin, std::uint64_t length) {
        const bool is_there = begin >= start_ && begin + length <= start_ + filled_;
        if (!is_there && !move_to(begin, length)) {
            return nullptr;
        }
        return memory_.start() + (begin - start_);
    }
    bool is_given_up() const noexcept { return memory_.bytes() == 0 || failures_ >= kMostFailures; }

private:
    bool move_to(std::uint64_t begin, std::uint64_t length) {
        start_ = begin / kIoAlignment * kIoAlignment;
        const std::uint64_t needed = round_up(begin + length, kIoAlignment) - start_;
        const std::uint64_t most = start_ < segment_bytes_ ? std::min(bytes_, segment_bytes_ - start_) : 0;
        // Where a window could not be read, no more is asked for than what is looked at.
        if (start_ >= careful_until_ && fill(needed, most)) {
            return true;
        }
        careful_until_ = std::max(careful_until_, start_ + most);
        return fill(needed, needed <= most ? needed : 0);
    }
    bool fill(std::uint64_t needed, std::uint64_t wanted) {
        filled_ = 0;
        if (is_given_up() || needed > wanted) {
            return false;
        }
        if (!read_(start_, memory_.span().first(wanted))) {
            ++failures_;
            return false;
        }
        filled_ = wanted;
        return true;
    }

    const ReadExactly& read_;
    const std::uint64_t segment_bytes_;
    std::uint64_t bytes_ = 0;
    AlignedMemory memory_;
    std::uint64_t start_ = 0;
    std::uint64_t filled_ = 0;
    std::uint64_t careful_until_ = 0;
    std::uint32_t failures_ = 0;
};

// The record at a place, if there is one, and where to look next.
struct Seen {
    std::optional<RecordHeader> record;
    std::uint64_t next = 0;
};

// Whether the stored bytes are the record that the header describes. A coded record is decoded into `scratch`.
bool is_whole(const RecordHeader& header, std::span<const std::uint8_t> stored, std::vector<std::uint8_t>& scratch) {
    if (header.coded_length != 0) {
        scratch.resize(header.length);
        if (!decode_record(stored, scratch)) {
            return false;
        }
        stored = scratch;
    }
    return digest_record(stored, name_of(header.key)) == header.digest;
}

Seen see_record(Window& window, std::uint64_t at, const SegmentLife& life, std::uint64_t segment_bytes,
                std::uint64_t record_limit_bytes, std::vector<std::uint8_t>& scratch) {
    const std::byte* bytes = window.see(at, kRecordHeaderBytes);
    if (bytes == nullptr) {
        return {std::nullopt, round_up(at + 1, kIoAlignment)};
    }
    RecordHeader header;
    std::memcpy(&header, bytes, sizeof header);
    if (!is_record_header(header, life, segment_bytes - at)) {
        return {std::nullopt, at + kRecordAlignment};  // behind what was written together, or within what was damaged
    }
    const std::uint64_t stored = stored_length(header), end = at + record_footprint(stored);
    if (header.flag == RecordFlag::removal) {
        return {header, end};
    }
    bytes = window.see(at, kRecordHeaderBytes + stored);
    if (bytes == nullptr || (header.coded_length != 0 && header.length > record_limit_bytes)) {
        return {std::nullopt, end};
    }
    const auto* const record = reinterpret_cast<const std::uint8_t*>(bytes + kRecordHeaderBytes);
    return is_whole(header, {record, stored}, scratch) ? Seen{header, end} : Seen{std::nullopt, at + kRecordAlignment};
}

std::vector<FooterEntry> scan(const ReadExactly& read, const SegmentLife& life, std::uint64_t segment_bytes,
                              std::uint64_t record_limit_bytes) {
    Window window(read, segment_bytes, record_limit_bytes);
    std::vector<FooterEntry> entries;
    std::vector<std::uint8_t> scratch;
    for (std::uint64_t at = kHeadBytes; at + kRecordHeaderBytes <= segment_bytes && !window.is_given_up();) {
        const Seen seen = see_record(window, at, life, segment_bytes, record_limit_bytes, scratch);
        if (const std::optional<RecordHeader>& one = seen.record) {
            entries.push_back({at, one->length, one->digest, one->key, one->parent, one->flag, 0,
                               static_cast<std::uint32_t>(one->coded_length)});
        }
        at = seen.next;
    }
    return entries;
}

}  // namespace

std::optional<std::vector<FooterEntry>> find_footer(const ReadExactly& read, const SegmentLife& life,
                                                    std::uint64_t segment_bytes) {
    Result<AlignedMemory> block = AlignedMemory::create(sizeof(FooterTail));
    if (!block.ok() || !read(segment_bytes - sizeof(FooterTail), block.value().span())) {
        return std::nullopt;
    }
    FooterTail tail;
    std::memcpy(&tail, block.value().start(), sizeof tail);
    if (!is_footer_tail(tail, life, segment_bytes)) {
        return std::nullopt;
    }
    std::vector<FooterEntry> entries(tail.entry_count);
    const std::uint64_t bytes = footer_bytes(tail.entry_count) - sizeof tail;
    if (bytes == 0) {
        return are_entries({}, tail) ? std::optional(entries) : std::nullopt;
    }
    Result<AlignedMemory> memory = AlignedMemory::create(bytes);
    if (!memory.ok() || !read(tail.entries_offset, memory.value().span()) ||
        !are_entries(memory.value().span(), tail)) {
        return std::nullopt;
    }
    std::memcpy(entries.data(), memory.value().start(), entries.size() * sizeof(FooterEntry));
    return entries;
}

std::optional<FoundSegment> find_segment(const ReadExactly& read, std::uint64_t store, std::uint64_t segment_bytes,
                                         std::uint64_t record_limit_bytes) {
    Result<AlignedMemory> block = AlignedMemory::create(kHeadBytes);
    if (!block.ok() || !read(0, block.value().span())) {
        return std::nullopt;
    }
    SegmentHead head;
    std::memcpy(&head, block.value().start(), sizeof head);
    if (!is_segment_head(head, store, segment_bytes)) {
        return std::nullopt;
    }
    if (std::optional<std::vector<FooterEntry>> entries = find_footer(read, head.life, segment_bytes)) {
        return FoundSegment{head.life, true, true, std::move(*entries)};
    }
    return FoundSegment{head.life, false, true, scan(read, head.life, segment_bytes, record_limit_bytes)};
}

}  // namespace kvo
