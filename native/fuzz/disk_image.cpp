#include "disk_image.hpp"

#include <array>
#include <cstring>

namespace kvo::fuzz {
namespace {

constexpr std::uint64_t kPlaces = kImageBytes / kRecordAlignment;
constexpr std::array<std::uint64_t, 4> kLengths = {10, 300, 5000, 64};

void write(std::vector<std::byte>& image, std::uint64_t at, std::span<const std::byte> bytes) {
    const std::uint64_t begin = std::min<std::uint64_t>(at, image.size());
    const std::uint64_t size = std::min<std::uint64_t>(bytes.size(), image.size() - begin);
    std::ranges::copy(bytes.first(size), image.begin() + static_cast<std::ptrdiff_t>(begin));
}

template <typename Block>
std::span<const std::byte> bytes_of(const Block& block) {
    return std::as_bytes(std::span(&block, 1));
}

// Right again after one of its bytes was changed: the last word is the checksum of what is before.
template <typename Block>
void seal(Block& block) {
    block.checksum = checksum_of(bytes_of(block).first(sizeof(block) - sizeof(block.checksum)));
}

SegmentLife read_life(Input& input) {
    const std::uint8_t store = input.byte(), generation = input.byte();
    return {kImageStore + store, generation};
}

// Small in a byte, or any.
std::uint64_t read_length(Input& input) {
    const std::uint8_t kind = input.byte();
    if (kind < kLengths.size()) {
        return kLengths[kind];
    }
    return kind % 2 == 0 ? input.number<std::uint16_t>() : input.number<std::uint64_t>();
}

RecordFlag read_flag(Input& input) { return static_cast<RecordFlag>(input.byte()); }

void add_record(std::vector<std::byte>& image, Input& input) {
    const std::uint64_t at = input.number<std::uint16_t>() % kPlaces * kRecordAlignment;
    const SegmentLife life = read_life(input);
    const RecordKey key = record_key(input.byte());
    const std::uint64_t length = read_length(input);
    const RecordFlag flag = read_flag(input);
    const bool is_whole = length <= kImageBytes;
    const std::vector<std::byte> bytes = record_bytes(is_whole ? length : 0);
    const std::uint64_t digest =
        digest_record({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, name_of(key));
    const RecordHeader header = make_record_header(life, key, {}, length, digest + input.byte(), flag);
    write(image, at, bytes_of(header));
    write(image, at + sizeof(header), bytes);
}

void add_footer(std::vector<std::byte>& image, Input& input) {
    const SegmentLife life = read_life(input);
    std::vector<FooterEntry> entries(input.byte() % 64);
    for (FooterEntry& entry : entries) {
        entry.offset = input.number<std::uint16_t>() % kPlaces * kRecordAlignment + input.byte();
        entry.key = record_key(input.byte());
        entry.length = read_length(input);
        entry.flag = read_flag(input);
    }
    const std::uint64_t bytes = footer_bytes(entries.size());
    std::vector<std::byte> padded(bytes - sizeof(FooterTail));
    std::ranges::copy(std::as_bytes(std::span(entries)), padded.begin());
    FooterTail tail = make_footer_tail(life, entries.size(), kImageBytes, padded);
    if (input.byte() != 0) {
        tail.entry_count = input.number<std::uint64_t>();
        tail.entries_offset = input.number<std::uint64_t>();
        seal(tail);
    }
    write(image, kImageBytes - bytes, padded);
    write(image, kImageBytes - sizeof(tail), bytes_of(tail));
}

void add_head(std::vector<std::byte>& image, Input& input) {
    const SegmentLife life = read_life(input);
    SegmentHead head = make_segment_head(life, kImageBytes);
    if (input.byte() != 0) {
        head.segment_bytes = input.number<std::uint64_t>();
        head.version = input.number<std::uint16_t>();
        seal(head);
    }
    write(image, 0, bytes_of(head));
}

void add_noise(std::vector<std::byte>& image, Input& input) {
    const std::uint64_t at = input.number<std::uint16_t>();
    write(image, at, std::as_bytes(input.take(input.byte())));
}

// Into a record's header, which then has the checksum that belongs to it.
void add_sealed_noise(std::vector<std::byte>& image, Input& input) {
    const std::uint64_t at = input.number<std::uint16_t>() % kPlaces * kRecordAlignment;
    RecordHeader header;
    if (at + sizeof(header) > image.size()) {
        return;
    }
    std::memcpy(&header, image.data() + at, sizeof(header));
    const std::uint64_t within = input.byte() % (sizeof(header) - sizeof(std::uint64_t));
    const auto number = input.number<std::uint64_t>();
    std::memcpy(reinterpret_cast<std::byte*>(&header) + within, &number, sizeof(number));
    seal(header);
    write(image, at, bytes_of(header));
}

}  // namespace

RecordKey record_key(std::uint8_t number) {
    RecordKey key;
    key.fingerprint.fill(0x46);
    key.block_hash.fill(number);
    key.group = number % 3;
    return key;
}

std::vector<std::byte> record_bytes(std::uint64_t length) {
    std::vector<std::byte> bytes(length);
    for (std::uint64_t at = 0; at < length; ++at) {
        bytes[at] = static_cast<std::byte>(at * 7 + length);
    }
    return bytes;
}

std::vector<std::byte> make_image(Input& input) {
    std::vector<std::byte> image(kImageBytes);
    while (!input.is_empty()) {
        switch (static_cast<Part>(input.byte() % kPartKinds)) {
            case Part::noise:
                add_noise(image, input);
                break;
            case Part::head:
                add_head(image, input);
                break;
            case Part::record:
                add_record(image, input);
                break;
            case Part::footer:
                add_footer(image, input);
                break;
            case Part::sealed_noise:
                add_sealed_noise(image, input);
                break;
            case Part::end:
                return image;
        }
    }
    return image;
}

Bytes describe_segment(bool is_sealed) {
    Output output;
    output.number(Part::head).number<std::uint8_t>(0).number<std::uint8_t>(3).number<std::uint8_t>(0);
    std::uint64_t offset = kHeadBytes;
    Output entries;
    for (std::uint8_t i = 0; i < kLengths.size(); ++i) {
        const auto place = static_cast<std::uint16_t>(offset / kRecordAlignment);
        output.number(Part::record).number(place).number<std::uint8_t>(0).number<std::uint8_t>(3);
        output.number(i).number(i).number<std::uint8_t>(0).number<std::uint8_t>(0);
        entries.number(place).number<std::uint8_t>(0).number(i).number(i).number<std::uint8_t>(0);
        offset += record_footprint(kLengths[i]);
    }
    if (is_sealed) {
        output.number(Part::footer).number<std::uint8_t>(0).number<std::uint8_t>(3);
        output.number(static_cast<std::uint8_t>(kLengths.size())).add(entries.bytes()).number<std::uint8_t>(0);
    }
    output.number(Part::end);
    return output.bytes();
}

Bytes describe_lying_segment() {
    Output output;
    output.number(Part::head).number<std::uint8_t>(0).number<std::uint8_t>(3).number<std::uint8_t>(0);
    output.number(Part::footer).number<std::uint8_t>(0).number<std::uint8_t>(3).number<std::uint8_t>(1);
    output.number(static_cast<std::uint16_t>(kPlaces - 200)).number<std::uint8_t>(0).number<std::uint8_t>(0);
    output.number<std::uint8_t>(4).number<std::uint16_t>(0xf000).number<std::uint8_t>(0).number<std::uint8_t>(0);
    return output.number(Part::end).bytes();
}

}  // namespace kvo::fuzz
