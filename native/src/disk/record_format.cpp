#include "disk/record_format.hpp"

#include <algorithm>
#include <cstring>

namespace kvo {
namespace {

constexpr std::uint32_t kRecordMagic = 0x524f564b;   // "KVOR"
constexpr std::uint32_t kSegmentMagic = 0x534f564b;  // "KVOS"
constexpr std::uint32_t kFooterMagic = 0x464f564b;   // "KVOF"

// Checksum of everything in front of the block's own checksum, which is its last word.
template <typename Block>
std::uint64_t own_checksum(const Block& block) {
    static_assert(offsetof(Block, checksum) + sizeof block.checksum == sizeof(Block));
    return checksum_of(std::as_bytes(std::span(&block, 1)).first(offsetof(Block, checksum)));
}

bool is_known_flag(RecordFlag flag) { return flag == RecordFlag::none || flag == RecordFlag::removal; }

bool is_version(std::uint16_t version) { return version >= kDiskVersion && version <= kSealedVersion; }

// A coded record must be shorter than the plain one, and only later versions of the format have coded and sealed ones.
template <typename Record>
bool is_stored_rightly(const Record& record, std::uint16_t version) {
    if (is_sealed(record)) {
        return version == kSealedVersion && record.flag == RecordFlag::none &&
               record.coded_length >= kSealOverheadBytes && record.coded_length - kSealOverheadBytes <= record.length;
    }
    const bool is_coded_rightly =
        version >= kCodedVersion && record.flag == RecordFlag::none && record.coded_length < record.length;
    return record.coded_length == 0 || is_coded_rightly;
}

std::uint16_t footer_version(std::span<const std::byte> entries, std::uint64_t count) {
    std::uint16_t version = kDiskVersion;
    for (std::uint64_t i = 0; i < count; ++i) {
        FooterEntry entry;
        std::memcpy(&entry, entries.data() + i * sizeof entry, sizeof entry);
        if (is_sealed(entry)) {
            return kSealedVersion;
        }
        version = entry.coded_length != 0 ? kCodedVersion : version;
    }
    return version;
}

}  // namespace

std::uint64_t checksum_of(std::span<const std::byte> bytes) {
    const RunDigest sum = digest_run({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, 0);
    return digest_field::mix(sum.low);
}

RecordHeader make_record_header(const SegmentLife& life, const RecordKey& key, const Name32& parent,
                                std::uint64_t length, std::uint64_t digest, RecordFlag flag, std::uint64_t coded_length,
                                std::optional<std::uint64_t> sealed_with) {
    RecordHeader header;
    header.magic = kRecordMagic;
    header.version = sealed_with ? kSealedVersion : coded_length == 0 ? kDiskVersion : kCodedVersion;
    header.flag = flag;
    header.life = life;
    header.length = length;
    header.digest = sealed_with.value_or(digest);
    header.key = key;
    header.parent = parent;
    header.coded_length = coded_length;
    header.checksum = own_checksum(header);
    return header;
}

FooterEntry make_entry(std::uint64_t offset, const RecordHeader& header) {
    return {offset,
            header.length,
            header.digest,
            header.key,
            header.parent,
            header.flag,
            static_cast<std::uint16_t>(is_sealed(header) ? 1 : 0),
            static_cast<std::uint32_t>(header.coded_length)};
}

SegmentHead make_segment_head(const SegmentLife& life, std::uint64_t segment_bytes) {
    SegmentHead head;
    head.magic = kSegmentMagic;
    head.version = kDiskVersion;
    head.life = life;
    head.segment_bytes = segment_bytes;
    head.checksum = own_checksum(head);
    return head;
}

FooterTail make_footer_tail(const SegmentLife& life, std::uint64_t entry_count, std::uint64_t segment_bytes,
                            std::span<const std::byte> entries) {
    FooterTail tail;
    tail.magic = kFooterMagic;
    tail.version = footer_version(entries, entry_count);
    tail.life = life;
    tail.entry_count = entry_count;
    tail.entries_offset = segment_bytes - footer_bytes(entry_count);
    tail.entries_checksum = checksum_of(entries);
    tail.checksum = own_checksum(tail);
    return tail;
}

bool is_record_header(const RecordHeader& header, const SegmentLife& life, std::uint64_t bytes_left) {
    return header.magic == kRecordMagic && is_version(header.version) && header.life == life &&
           header.checksum == own_checksum(header) && is_known_flag(header.flag) &&
           header.length <= kMaxDiskRecordBytes && is_stored_rightly(header, header.version) &&
           record_footprint(stored_length(header)) <= bytes_left;
}

bool is_segment_head(const SegmentHead& head, std::uint64_t store, std::uint64_t segment_bytes) {
    return head.magic == kSegmentMagic && head.version == kDiskVersion && head.life.store == store &&
           head.segment_bytes == segment_bytes && head.checksum == own_checksum(head);
}

bool is_footer_tail(const FooterTail& tail, const SegmentLife& life, std::uint64_t segment_bytes) {
    const std::uint64_t most = segment_bytes / sizeof(FooterEntry);
    return tail.magic == kFooterMagic && is_version(tail.version) && tail.life == life &&
           tail.checksum == own_checksum(tail) && tail.entry_count <= most &&
           footer_bytes(tail.entry_count) <= segment_bytes - kHeadBytes &&
           tail.entries_offset == segment_bytes - footer_bytes(tail.entry_count);
}

bool are_entries(std::span<const std::byte> entries, const FooterTail& tail) {
    if (entries.size() != footer_bytes(tail.entry_count) - sizeof(FooterTail) ||
        checksum_of(entries) != tail.entries_checksum) {
        return false;
    }
    for (std::uint64_t i = 0; i < tail.entry_count; ++i) {
        FooterEntry entry;
        std::memcpy(&entry, entries.data() + i * sizeof entry, sizeof entry);
        const bool fits = entry.offset >= kHeadBytes && entry.offset % kRecordAlignment == 0 &&
                          entry.length <= kMaxDiskRecordBytes && entry.offset <= tail.entries_offset &&
                          record_footprint(stored_length(entry)) <= tail.entries_offset - entry.offset;
        if (!fits || !is_stored_rightly(entry, tail.version) || !is_known_flag(entry.flag)) {
            return false;
        }
    }
    return true;
}

}  // namespace kvo
