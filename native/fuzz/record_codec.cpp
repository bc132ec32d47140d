// A coded record, as it may lie on a disk: what of it is read, every path reads alike, within the record's memory.
#include "codec/record_codec.hpp"

#include <cstring>

#include "check.hpp"
#include "codec/coded_form.hpp"
#include "codec_records.hpp"
#include "target.hpp"

using namespace kvo;

namespace {

constexpr std::size_t kMost = 1 << 20;

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
}
