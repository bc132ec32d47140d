// The contents of a segment file, byte for byte as docs/format.md says: a head, then the records, then a footer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "codec/record_seal.hpp"
#include "digest/digest.hpp"
#include "io/io_engine.hpp"

namespace kvo {

inline constexpr std::uint16_t kDiskVersion = 1;
inline constexpr std::uint16_t kCodedVersion = 2;   // of a record that is coded, and of a footer that speaks of one
inline constexpr std::uint16_t kSealedVersion = 3;  // likewise of a record that is sealed, coded or not
inline constexpr std::uint64_t kRecordAlignment = 64;
inline constexpr std::uint64_t kHeadBytes = kIoAlignment;
inline constexpr std::uint64_t kMaxDiskRecordBytes = std::uint64_t{1} << 31;

using Name32 = std::array<std::uint8_t, 32>;

struct RecordKey {
    Name32 fingerprint{};
    Name32 block_hash{};
    std::uint32_t group = 0;
    std::uint32_t shard = 0;

    friend bool operator==(const RecordKey&, const RecordKey&) = default;
};

inline RecordName name_of(const RecordKey& key) { return {key.fingerprint, key.block_hash, key.group, key.shard}; }

inline SealedName sealed_name(const RecordKey& key, const Name32& parent, std::uint64_t length) {
    return {name_of(key), parent, length};
}

enum class RecordFlag : std::uint16_t {
    none = 0,
    removal = 1,  // no bytes: what older segments have under this key is gone
};

// The numbers that tell a segment's present content from what it held before, and from another store's.
struct SegmentLife {
    std::uint64_t store = 0;
    std::uint64_t generation = 0;

    friend bool operator==(const SegmentLife&, const SegmentLife&) = default;
};

struct RecordHeader {
    std::uint32_t magic = 0;
    std::uint16_t version = 0;
    RecordFlag flag = RecordFlag::none;
    SegmentLife life;
    std::uint64_t length = 0;  // of the record's bytes
    std::uint64_t digest = 0;  // of these, however they are stored; of a sealed record the number of its key
    RecordKey key;
    Name32 parent{};
    std::uint64_t coded_length = 0;  // of the bytes that follow, if they are coded or sealed; else 0
    std::uint64_t checksum = 0;      // of all before
};
static_assert(sizeof(RecordHeader) == 160);

inline constexpr std::uint64_t kRecordHeaderBytes = sizeof(RecordHeader);

// The file's first block.
struct SegmentHead {
    std::uint32_t magic = 0;
    std::uint16_t version = 0;
    std::uint16_t reserved = 0;
    SegmentLife life;
    std::uint64_t segment_bytes = 0;
    std::uint8_t zeros[kHeadBytes - 40]{};
    std::uint64_t checksum = 0;
};
static_assert(sizeof(SegmentHead) == kHeadBytes);

struct FooterEntry {
    std::uint64_t offset = 0;  // of the record's header
    std::uint64_t length = 0;
    std::uint64_t digest = 0;
    RecordKey key;
    Name32 parent{};
    RecordFlag flag = RecordFlag::none;
    std::uint16_t sealed = 0;        // 1 if the record is
    std::uint32_t coded_length = 0;  // as in the header
};
static_assert(sizeof(FooterEntry) == 136);

// The file's last block. The entries end where it begins, behind zeros that fill their last block.
struct FooterTail {
    std::uint32_t magic = 0;
    std::uint16_t version = 0;
    std::uint16_t reserved = 0;
    SegmentLife life;
    std::uint64_t entry_count = 0;
    std::uint64_t entries_offset = 0;
    std::uint64_t entries_checksum = 0;
    std::uint8_t zeros[kHeadBytes - 56]{};
    std::uint64_t checksum = 0;
};
static_assert(sizeof(FooterTail) == kHeadBytes);

constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

// Bytes that a record of this length takes in its segment.
constexpr std::uint64_t record_footprint(std::uint64_t length) {
    return round_up(kRecordHeaderBytes + length, kRecordAlignment);
}

// Number of bytes that follow the record's header; takes a header or a footer's entry.
constexpr std::uint64_t stored_length(const auto& record) {
    return record.coded_length == 0 ? record.length : record.coded_length;
}

constexpr std::uint64_t footer_bytes(std::uint64_t entry_count) {
    return round_up(entry_count * sizeof(FooterEntry), kIoAlignment) + sizeof(FooterTail);
}

// 64 bits that any change of up to 8 bytes within a word changes. Never 0 of bytes that are not all zeros but for
// 2^-64.
std::uint64_t checksum_of(std::span<const std::byte> bytes);

inline bool is_sealed(const RecordHeader& header) { return header.version == kSealedVersion; }
inline bool is_sealed(const FooterEntry& entry) { return entry.sealed != 0; }

// `sealed_with`: the number of its key, if the record is sealed.
RecordHeader make_record_header(const SegmentLife& life, const RecordKey& key, const Name32& parent,
                                std::uint64_t length, std::uint64_t digest, RecordFlag flag,
                                std::uint64_t coded_length = 0,
                                std::optional<std::uint64_t> sealed_with = std::nullopt);
// The entry of a record whose header begins at `offset`.
FooterEntry make_entry(std::uint64_t offset, const RecordHeader& header);
SegmentHead make_segment_head(const SegmentLife& life, std::uint64_t segment_bytes);
FooterTail make_footer_tail(const SegmentLife& life, std::uint64_t entry_count, std::uint64_t segment_bytes,
                            std::span<const std::byte> entries);

// Whether it is a whole record header of this life, whose record ends within `bytes_left`.
bool is_record_header(const RecordHeader& header, const SegmentLife& life, std::uint64_t bytes_left);

// Whether it is a whole segment head of this store, for segments of this size.
bool is_segment_head(const SegmentHead& head, std::uint64_t store, std::uint64_t segment_bytes);

// Whether it is a whole footer tail of this life, with room for its entries. `are_entries` checks their contents.
bool is_footer_tail(const FooterTail& tail, const SegmentLife& life, std::uint64_t segment_bytes);

// Whether the bytes between `entries_offset` and the tail are whole entries, each of a record that lies before them in
// the segment.
bool are_entries(std::span<const std::byte> entries, const FooterTail& tail);

}  // namespace kvo
