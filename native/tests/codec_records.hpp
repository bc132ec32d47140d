// Records of all kinds that the codec meets, made from a seed.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace kvo::test {

using CodecBytes = std::vector<std::uint8_t>;

enum class RecordKind { random, zeros, bfloat16, float8, float32, counted, mixed };

inline constexpr RecordKind kRecordKinds[] = {RecordKind::random, RecordKind::zeros,   RecordKind::bfloat16,
                                              RecordKind::float8, RecordKind::float32, RecordKind::counted,
                                              RecordKind::mixed};

// Numbers of a normal distribution, whose size depends on their column.
inline float made_number(std::size_t column, std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    return std::ldexp(normal(random), static_cast<int>(column * 7 % 4));
}

inline CodecBytes make_codec_record(RecordKind kind, std::size_t length, std::size_t columns, std::mt19937_64& random) {
    CodecBytes record(length);
    for (std::size_t i = 0; i < length; ++i) {
        if (kind == RecordKind::random || (kind == RecordKind::mixed && i / 50000 % 2 == 1)) {
            record[i] = static_cast<std::uint8_t>(random());
        } else if (kind == RecordKind::counted) {
            record[i] = static_cast<std::uint8_t>(i / 2);
        }
    }
    const std::size_t bytes = kind == RecordKind::float32 ? 4 : kind == RecordKind::float8 ? 1 : 2;
    const bool is_float = bytes != 2 || kind == RecordKind::bfloat16 || kind == RecordKind::mixed;
    for (std::size_t at = 0; is_float && at + bytes <= length; at += bytes) {
        const auto word = std::bit_cast<std::uint32_t>(made_number(at / bytes % columns, random));
        // Of eight bits: the sign, four bits of an exponent and three of the fraction.
        const auto eight = static_cast<std::uint8_t>((word >> 24 & 0x80) | (((word >> 20) - (120U << 3)) & 0x7f));
        const auto upper = static_cast<std::uint16_t>(word >> 16);
        if (kind == RecordKind::float32) {
            std::memcpy(record.data() + at, &word, 4);
        } else if (kind == RecordKind::float8) {
            record[at] = eight;
        } else if (kind == RecordKind::bfloat16 || at / 50000 % 2 == 0) {
            std::memcpy(record.data() + at, &upper, 2);
        }
    }
    return record;
}

}  // namespace kvo::test
