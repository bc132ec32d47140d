// A coded record, as it may lie on a disk: what of it is read, every path reads alike, within the record's memory.
#include "codec/record_codec.hpp"

#include <array>
#include <cstring>

#include "check.hpp"
#include "codec/codec_paths.hpp"
#include "codec_records.hpp"
#include "target.hpp"

using namespace kvo;

namespace {

constexpr std::size_t kMost = 1 << 20;
constexpr std::size_t kUnits = 24 * kLanes;

struct Words {
    fuzz::Bytes bytes;
    SymbolStream stream;
};

// As a chunk has them, whose states stand before its words.
Words make_words(fuzz::Input& input) {
    Words made;
    make_decode_table(count_parts(input.take(input.byte())), made.stream.table);
    for (std::uint32_t& state : made.stream.states) {
        state = std::max(input.number<std::uint32_t>() >> 1, kStateLow);
    }
    const std::span<const std::uint8_t> words = input.take(input.number<std::uint16_t>() % (4 * kUnits));
    made.bytes.assign(kStateBytes, 0);
    made.bytes.insert(made.bytes.end(), words.begin(), words.end());
    made.stream.words = {made.bytes.data() + kStateBytes, made.bytes.data() + made.bytes.size()};
    return made;
}

// Streams that are decoded at once are decoded as each would be by itself.
void run_streams(fuzz::Input input) {
    const Words first = make_words(input), second = make_words(input);
    const std::array made = {first.stream, second.stream};
    for (const CodecPath& path : codec_paths()) {
        std::array<SymbolStream, kMaxStreams> wanted = made, streams = made;
        std::array<std::uint8_t, kMaxStreams * kUnits> wanted_symbols{}, symbols{};
        const std::array<SymbolStream*, kMaxStreams> pointers = {streams.data(), streams.data() + 1};
        bool is_whole = true;
        for (std::size_t i = 0; i < path.streams; ++i) {
            SymbolStream* const own = &wanted[i];
            is_whole &= codec_paths().back().decode(std::span(&own, 1), wanted_symbols.data() + i * kUnits, kUnits);
        }
        CHECK_EQUAL(path.decode(std::span(pointers).first(path.streams), symbols.data(), kUnits), is_whole);
        for (std::size_t i = 0; is_whole && i < path.streams; ++i) {
            CHECK(streams[i].words.at == wanted[i].words.at && streams[i].states == wanted[i].states);
        }
        CHECK(!is_whole || symbols == wanted_symbols);
    }
}

}  // namespace

std::vector<fuzz::Bytes> fuzz::make_seeds() {
    std::mt19937_64 random(36);
    std::vector<Bytes> seeds;
    for (const test::RecordKind kind : test::kRecordKinds) {
        for (const std::size_t length : {700, 4096, 20000}) {
            RecordEncoder encoder;
            const std::span<const std::uint8_t> coded =
                encoder.encode(test::make_codec_record(kind, length, 64, random));
            if (!coded.empty()) {
                seeds.emplace_back(coded.begin(), coded.end());
            }
        }
    }
    for (const int bits : {1, 4, 7}) {
        Bytes seed(4000);
        std::ranges::generate(seed, [&] { return static_cast<std::uint8_t>(random() & ((1U << bits) - 1)); });
        for (std::size_t stream = 0, at = 0; stream < kMaxStreams; ++stream, at += 256 + kStateBytes + 2 + 0x500) {
            seed[at] = 255;
            std::ranges::generate_n(seed.begin() + static_cast<std::ptrdiff_t>(at) + 256, kStateBytes, random);
            seed[at + 256 + kStateBytes] = 0;
            seed[at + 256 + kStateBytes + 1] = 5;
        }
        seeds.push_back(seed);
    }
    return seeds;
}

// The length is the one that the record says it has, as a reader would ask for it that was deceived as well.
void fuzz::run(std::span<const std::uint8_t> input) {
    const Bytes coded(input.begin(), input.end());
    std::uint64_t said = 0;
    if (coded.size() >= sizeof(CodedHead)) {
        std::memcpy(&said, coded.data() + offsetof(CodedHead, length), sizeof said);
    }
    const auto length = static_cast<std::size_t>(std::min<std::uint64_t>(said, kMost));
    const CodecPath& portable = codec_paths().back();
    Bytes wanted(length);
    const bool is_record = decode_record(coded, wanted, portable);
    for (const CodecPath& path : codec_paths()) {
        Bytes decoded(length);
        CHECK_EQUAL(decode_record(coded, decoded, path), is_record);
        CHECK(!is_record || decoded == wanted);
    }
    // And bytes as a record.
    RecordEncoder encoder;
    const std::span<const std::uint8_t> again = encoder.encode(input);
    Bytes decoded(input.size());
    CHECK(again.empty() || (decode_record(again, decoded) && decoded == coded));
    run_streams(Input(input));
}
