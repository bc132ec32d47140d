// Recovery of a segment file: head, footer and records, with right checksums around anything.
#include <cstring>
#include <vector>

#include "check.hpp"
#include "disk/recovery.hpp"
#include "disk_image.hpp"

using namespace kvo;

namespace {

constexpr std::uint64_t kLimit = 16 << 10;

}  // namespace

// The last byte: from which eighth of the file on it cannot be read.
std::vector<fuzz::Bytes> fuzz::make_seeds() {
    std::vector<Bytes> seeds;
    for (const bool is_sealed : {false, true}) {
        for (const std::uint8_t readable : {std::uint8_t{8}, std::uint8_t{1}}) {
            seeds.push_back(Output().add(describe_segment(is_sealed)).number(readable).bytes());
        }
    }
    seeds.push_back(Output().add(describe_lying_segment()).number<std::uint8_t>(8).bytes());
    return seeds;
}

void fuzz::run(std::span<const std::uint8_t> bytes) {
    Input input(bytes);
    const std::vector<std::byte> image = make_image(input);
    const std::uint64_t readable = input.is_empty() ? kImageBytes : input.byte() * (kImageBytes / 8);
    std::size_t failed = 0;
    const ReadExactly read = [&](std::uint64_t offset, std::span<std::byte> target) {
        CHECK(offset % kIoAlignment == 0 && target.size() % kIoAlignment == 0);
        CHECK(target.size() <= kImageBytes && offset <= kImageBytes - target.size());
        if (offset + target.size() > readable) {
            ++failed;
            return false;
        }
        std::memcpy(target.data(), image.data() + offset, target.size());
        return true;
    };
    static const Result<SealKeys> keys = SealKeys::make(std::vector<SealKey>(1));
    CHECK(keys.ok());
    const std::optional<FoundSegment> found = find_segment(read, kImageStore, kImageBytes, kLimit, &keys.value());
    CHECK(failed <= 20);
    if (!found) {
        return;
    }
    CHECK_EQUAL(found->life.store, kImageStore);
    std::uint64_t end = kHeadBytes;
    for (const FooterEntry& entry : found->entries) {
        CHECK(entry.offset >= kHeadBytes && entry.offset % kRecordAlignment == 0 && entry.offset < kImageBytes);
        CHECK(record_footprint(entry.length) <= kImageBytes - entry.offset);
        if (found->has_footer) {
            continue;  // what it speaks of is verified when it is read
        }
        CHECK(entry.offset >= end);
        end = entry.offset + record_footprint(entry.flag == RecordFlag::removal ? 0 : entry.length);
        if (entry.flag == RecordFlag::none) {
            const auto* const record = reinterpret_cast<const std::uint8_t*>(image.data() + entry.offset);
            const std::span<const std::uint8_t> whole(record + kRecordHeaderBytes, entry.length);
            CHECK_EQUAL(digest_record(whole, name_of(entry.key)), entry.digest);
        }
    }
}
