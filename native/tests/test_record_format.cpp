#include "disk/record_format.hpp"

#include <cstring>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

constexpr SegmentLife kLife{0x1122334455667788, 7};
constexpr std::uint64_t kSegment = 64 << 10;

RecordHeader header() {
    RecordKey key;
    key.group = 3;
    return make_record_header(kLife, key, {}, 100, 42, RecordFlag::none);
}

std::vector<std::byte> two_entries() {
    std::vector<std::byte> bytes(kIoAlignment);
    const FooterEntry first{kHeadBytes, 100, 42, {}, {}, RecordFlag::none, {}};
    const FooterEntry second{kHeadBytes + 320, 0, 0, {}, {}, RecordFlag::removal, {}};
    std::memcpy(bytes.data(), &first, sizeof first);
    std::memcpy(bytes.data() + sizeof first, &second, sizeof second);
    return bytes;
}

// Whether the check refuses every change of one bit.
template <typename Block, typename Check>
bool sees_every_bit(const Block& good, Check check) {
    CHECK(check(good));
    for (std::size_t bit = 0; bit < 8 * sizeof good; ++bit) {
        Block changed = good;
        reinterpret_cast<std::uint8_t*>(&changed)[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        if (check(changed)) {
            return false;
        }
    }
    return true;
}

}  // namespace

TEST(a_changed_bit_of_a_header_is_seen) {
    CHECK(sees_every_bit(header(), [](const RecordHeader& one) { return is_record_header(one, kLife, 1 << 20); }));
}

TEST(a_changed_bit_of_a_head_is_seen) {
    const auto check = [](const SegmentHead& one) { return is_segment_head(one, kLife.store, kSegment); };
    CHECK(sees_every_bit(make_segment_head(kLife, kSegment), check));
}

TEST(a_changed_bit_of_a_footer_is_seen) {
    const std::vector<std::byte> entries = two_entries();
    const FooterTail tail = make_footer_tail(kLife, 2, kSegment, entries);
    CHECK(sees_every_bit(tail, [](const FooterTail& one) { return is_footer_tail(one, kLife, kSegment); }));
    CHECK(are_entries(entries, tail));
    for (std::size_t bit = 0; bit < 8 * entries.size(); ++bit) {
        std::vector<std::byte> changed = entries;
        changed[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
        CHECK(!are_entries(changed, tail));
    }
}

TEST(a_coded_record_takes_what_it_was_coded_to) {
    const RecordHeader coded = make_record_header(kLife, {}, {}, 1000, 42, RecordFlag::none, 300);
    CHECK_EQUAL(coded.version, kCodedVersion);
    CHECK(sees_every_bit(coded, [](const RecordHeader& one) { return is_record_header(one, kLife, 1 << 20); }));
    CHECK(is_record_header(coded, kLife, record_footprint(300)));
    CHECK(!is_record_header(coded, kLife, record_footprint(300) - 1));
    CHECK(!is_record_header(make_record_header(kLife, {}, {}, 1000, 42, RecordFlag::none, 1000), kLife, 1 << 20));
    CHECK(!is_record_header(make_record_header(kLife, {}, {}, 0, 0, RecordFlag::removal, 1), kLife, 1 << 20));
}

TEST(only_a_footer_of_the_later_version_speaks_of_coded_records) {
    std::vector<std::byte> entries(kIoAlignment);
    const FooterEntry coded{kHeadBytes, 1000, 42, {}, {}, RecordFlag::none, 0, 300};
    std::memcpy(entries.data(), &coded, sizeof coded);
    FooterTail tail = make_footer_tail(kLife, 1, kSegment, entries);
    CHECK_EQUAL(tail.version, kCodedVersion);
    CHECK(is_footer_tail(tail, kLife, kSegment) && are_entries(entries, tail));
    tail.version = kDiskVersion;
    CHECK(!are_entries(entries, tail));
    CHECK_EQUAL(make_footer_tail(kLife, 2, kSegment, two_entries()).version, kDiskVersion);
}

TEST(a_sealed_record_says_its_key_and_takes_what_it_was_sealed_to) {
    const RecordHeader sealed = make_record_header(kLife, {}, {}, 1000, 42, RecordFlag::none, 1048, 77);
    CHECK_EQUAL(sealed.version, kSealedVersion);
    CHECK_EQUAL(sealed.digest, 77u);
    CHECK(sees_every_bit(sealed, [](const RecordHeader& one) { return is_record_header(one, kLife, 1 << 20); }));
    CHECK(is_record_header(sealed, kLife, record_footprint(1048)));
    CHECK(!is_record_header(sealed, kLife, record_footprint(1048) - 1));
    for (const std::uint64_t length : {0, 47, 1049}) {
        const RecordHeader wrong = make_record_header(kLife, {}, {}, 1000, 42, RecordFlag::none, length, 77);
        CHECK(!is_record_header(wrong, kLife, 1 << 20));
    }
    CHECK(
        !is_record_header(make_record_header(kLife, {}, {}, 1000, 42, RecordFlag::removal, 1048, 77), kLife, 1 << 20));
}

TEST(only_a_footer_of_the_latest_version_speaks_of_sealed_records) {
    std::vector<std::byte> entries(kIoAlignment);
    const FooterEntry sealed =
        make_entry(kHeadBytes, make_record_header(kLife, {}, {}, 1000, 42, RecordFlag::none, 1048, 77));
    CHECK_EQUAL(sealed.sealed, std::uint16_t{1});
    CHECK_EQUAL(sealed.digest, 77u);
    std::memcpy(entries.data(), &sealed, sizeof sealed);
    FooterTail tail = make_footer_tail(kLife, 1, kSegment, entries);
    CHECK_EQUAL(tail.version, kSealedVersion);
    CHECK(is_footer_tail(tail, kLife, kSegment) && are_entries(entries, tail));
    tail.version = kCodedVersion;
    CHECK(!are_entries(entries, tail));
}

TEST(another_life_is_not_ours) {
    CHECK(!is_record_header(header(), {kLife.store, 8}, 1 << 20));
    CHECK(!is_record_header(header(), {kLife.store + 1, 7}, 1 << 20));
    CHECK(!is_segment_head(make_segment_head(kLife, kSegment), kLife.store + 1, kSegment));
    CHECK(!is_segment_head(make_segment_head(kLife, kSegment), kLife.store, 2 * kSegment));
    const FooterTail tail = make_footer_tail(kLife, 2, kSegment, two_entries());
    CHECK(!is_footer_tail(tail, {kLife.store, 6}, kSegment));
}

TEST(a_record_ends_within_its_segment) {
    CHECK(is_record_header(header(), kLife, record_footprint(100)));
    CHECK(!is_record_header(header(), kLife, record_footprint(100) - 1));
    // Entries with right checksums whose records are nowhere, as an attacker who knows the format could write them.
    std::vector<std::byte> entries(kIoAlignment);
    for (const std::uint64_t offset : {std::uint64_t{0}, kHeadBytes + 1, kSegment, kSegment - 8192 - 64}) {
        const FooterEntry wrong{offset, 100, 42, {}, {}, RecordFlag::none, {}};
        std::memcpy(entries.data(), &wrong, sizeof wrong);
        CHECK(!are_entries(entries, make_footer_tail(kLife, 1, kSegment, entries)));
    }
}

TEST(sizes_are_what_the_format_says) {
    CHECK_EQUAL(record_footprint(0), std::uint64_t{192});
    CHECK_EQUAL(record_footprint(32), std::uint64_t{192});
    CHECK_EQUAL(record_footprint(33), std::uint64_t{256});
    CHECK_EQUAL(footer_bytes(0), std::uint64_t{4096});
    CHECK_EQUAL(footer_bytes(30), std::uint64_t{8192});
    CHECK_EQUAL(footer_bytes(31), std::uint64_t{12288});
}
