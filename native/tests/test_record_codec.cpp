#include "codec/record_codec.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "check.hpp"
#include "codec/codec_paths.hpp"
#include "codec_records.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kSmall = 4096;  // every bit of what this is coded to is flipped

CodecBytes encoded(const CodecBytes& record) {
    RecordEncoder encoder;
    const std::span<const std::uint8_t> coded = encoder.encode(record);
    return {coded.begin(), coded.end()};
}

CodecBytes small_record(RecordKind kind) {
    std::mt19937_64 random(36);
    return make_codec_record(kind, kSmall, 64, random);
}

// Every path makes the same of it, and the record again; whether it is coded.
bool check_round_trip(const CodecBytes& record) {
    const CodecBytes coded = encoded(record);
    for (const CodecPath& path : codec_paths()) {
        RecordEncoder encoder(path);
        const std::span<const std::uint8_t> own = encoder.encode(record);
        CHECK(std::ranges::equal(own, coded));
        if (!coded.empty()) {
            CodecBytes decoded(record.size());
            CHECK(decode_record(coded, decoded, path));
            CHECK(decoded == record);
        }
    }
    CHECK(coded.size() * 100 <= record.size() * 95);
    return !coded.empty();
}

bool decodes_wrongly(const CodecBytes& coded, const CodecBytes& record) {
    CodecBytes decoded(record.size());
    for (const CodecPath& path : codec_paths()) {
        // Bytes that are wrong are for the record's digest to see; those that are right do no harm.
        if (decode_record(coded, decoded, path) && decoded == record) {
            return true;
        }
    }
    return false;
}

}  // namespace

TEST(the_portable_path_is_always_there) { CHECK_EQUAL(std::string(name_of(codec_paths().back())), "portable"); }

TEST(every_path_makes_the_same_bytes_and_the_record_again) {
    std::mt19937_64 random(7);
    std::size_t coded = 0;
    for (const RecordKind kind : kRecordKinds) {
        for (std::size_t length = 0; length < 300; length += 1 + length / 20) {
            coded += check_round_trip(make_codec_record(kind, length, 32, random)) ? 1 : 0;
        }
        for (const std::size_t columns : {32, 64, 96, 128, 576, 1024, 50}) {
            const std::size_t length = 1000 + random() % 400000;
            coded += check_round_trip(make_codec_record(kind, length, columns, random)) ? 1 : 0;
        }
    }
    CHECK(coded > 30);
}

TEST(whole_chunks_and_a_little_more_or_less) {
    std::mt19937_64 random(8);
    for (const std::size_t units : {kChunkUnits, 2 * kChunkUnits, 3 * kChunkUnits}) {
        for (const std::ptrdiff_t more : {-66, -1, 0, 1, 62, 64, 130}) {
            const auto length = static_cast<std::size_t>(static_cast<std::ptrdiff_t>(2 * units) + more);
            CHECK(check_round_trip(make_codec_record(RecordKind::bfloat16, length, 128, random)));
        }
    }
}

TEST(numbers_that_are_alike_become_shorter_and_random_bytes_are_left) {
    std::mt19937_64 random(9);
    constexpr std::size_t kLength = 1 << 20;
    const auto share = [&](RecordKind kind) {
        const CodecBytes coded = encoded(make_codec_record(kind, kLength, 128, random));
        return static_cast<double>(coded.size()) / kLength;
    };
    CHECK_EQUAL(share(RecordKind::random), 0.0);
    CHECK(share(RecordKind::bfloat16) < 0.67);
    CHECK(share(RecordKind::float8) < 0.85);
    CHECK(share(RecordKind::float32) < 0.84);
    CHECK(share(RecordKind::zeros) < 0.52);
}

TEST(a_record_that_is_random_in_parts_has_chunks_as_they_are) {
    std::mt19937_64 random(10);
    CHECK(check_round_trip(make_codec_record(RecordKind::mixed, 900000, 128, random)));
}

TEST(one_encoder_takes_records_of_all_sizes) {
    std::mt19937_64 random(11);
    RecordEncoder encoder;
    for (const std::size_t length : {5000, 700000, 64, 300000, 0, 700000}) {
        const CodecBytes record = make_codec_record(RecordKind::bfloat16, length, 64, random);
        const std::span<const std::uint8_t> coded = encoder.encode(record);
        CodecBytes decoded(length);
        CHECK(coded.empty() || (decode_record(coded, decoded) && decoded == record));
        CHECK(coded.empty() == (length < 5000));
    }
}

TEST(no_flipped_bit_passes_for_the_record) {
    for (const RecordKind kind : {RecordKind::bfloat16, RecordKind::float8, RecordKind::float32}) {
        const CodecBytes record = small_record(kind);
        CodecBytes coded = encoded(record);
        CHECK(!coded.empty());
        for (std::size_t bit = 0; bit < 8 * coded.size(); ++bit) {
            coded[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
            CHECK(!decodes_wrongly(coded, record));
            coded[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        }
    }
}

// Where paths decode several chunks at once, of which one has the wrong bit.
TEST(bits_that_are_flipped_in_one_of_many_chunks_are_seen) {
    std::mt19937_64 random(12);
    const CodecBytes record = make_codec_record(RecordKind::bfloat16, 9 * kChunkUnits, 128, random);
    CodecBytes coded = encoded(record);
    for (std::size_t i = 0; i < 300; ++i) {
        // One of eight near the heads of chunks, whose lengths are nearly equal.
        const std::size_t chunk = (coded.size() - sizeof(CodedHead)) * (random() % 5) / 5 + random() % 200;
        const std::size_t bit = i % 8 == 0 ? 8 * chunk : random() % (8 * coded.size());
        coded[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        CHECK(!decodes_wrongly(coded, record));
        coded[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    }
    CHECK(decodes_wrongly(coded, record));
}

TEST(what_is_cut_off_or_too_long_is_no_record) {
    const CodecBytes record = small_record(RecordKind::bfloat16), coded = encoded(record);
    CodecBytes decoded(record.size());
    for (std::size_t length = 0; length < coded.size(); ++length) {
        // Memory of its own, so that a read behind it is seen.
        const CodecBytes cut(coded.begin(), coded.begin() + static_cast<std::ptrdiff_t>(length));
        for (const CodecPath& path : codec_paths()) {
            CHECK(!decode_record(cut, decoded, path));
        }
    }
    CodecBytes longer = coded;
    longer.push_back(0);
    CHECK(!decode_record(longer, decoded));
}

TEST(lengths_that_lie_are_seen) {
    const CodecBytes record = small_record(RecordKind::bfloat16), coded = encoded(record);
    for (const std::size_t length : {std::size_t{0}, record.size() - 64, record.size() - 1, record.size() + 1,
                                     record.size() + 64, 16 * record.size()}) {
        CodecBytes decoded(length);
        CHECK(!decode_record(coded, decoded));
        CodecBytes lying = coded;
        const std::uint64_t said = length;
        std::memcpy(lying.data() + offsetof(CodedHead, length), &said, sizeof said);
        CHECK(!decode_record(lying, decoded));
    }
    for (std::uint32_t said : {0U, 1U, 100U, 0x7fffffffU, 0x80000000U, 0x80000800U, 0xffffffffU}) {
        CodecBytes lying = coded, decoded(record.size());
        std::memcpy(lying.data() + sizeof(CodedHead), &said, sizeof said);
        CHECK(!decode_record(lying, decoded));
    }
}

TEST(a_later_version_is_not_read) {
    const CodecBytes record = small_record(RecordKind::bfloat16);
    CodecBytes coded = encoded(record), decoded(record.size());
    CHECK(decode_record(coded, decoded));
    coded[0] = kCodecVersion + 1;
    CHECK(!decode_record(coded, decoded));
}
