#if defined(__x86_64__)

// GCC's own AVX-512 intrinsics read a variable that they leave unset on purpose (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "codec/codec_paths.hpp"

namespace kvo {
namespace {

#define KVO_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))

constexpr std::size_t kVectorLanes = 8;
constexpr std::size_t kVectors = kLanes / kVectorLanes;
constexpr std::size_t kSlack = 16;  // that a load of eight words may reach beyond the words it needs

using LaneOrders = std::array<std::array<std::uint8_t, kVectorLanes>, 256>;

// Which word each lane of a mask takes: the next one, in the order of the lanes.
constexpr LaneOrders kTaken = [] {
    LaneOrders orders{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        std::uint8_t next = 0;
        for (unsigned lane = 0; lane < kVectorLanes; ++lane) {
            orders[mask][lane] = (mask >> lane & 1) != 0 ? next++ : std::uint8_t{0};
        }
    }
    return orders;
}();

// Which lane each word comes from, the words of a mask's lanes at the end.
constexpr LaneOrders kGiven = [] {
    LaneOrders orders{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        std::size_t place = kVectorLanes - static_cast<std::size_t>(std::popcount(mask));
        for (std::uint8_t lane = 0; lane < kVectorLanes; ++lane) {
            if ((mask >> lane & 1) != 0) {
                orders[mask][place++] = lane;
            }
        }
    }
    return orders;
}();

KVO_AVX2 __m256i load_order(const LaneOrders& orders, unsigned mask) noexcept {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(orders[mask].data())));
}

KVO_AVX2 __m256i load(const void* source) noexcept { return _mm256_loadu_si256(static_cast<const __m256i*>(source)); }

KVO_AVX2 void store(void* target, __m256i vector) noexcept {
    _mm256_storeu_si256(static_cast<__m256i*>(target), vector);
}

KVO_AVX2 unsigned signs_of(__m256i lanes) noexcept {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
}

struct Parted {
    __m256i symbols, rest;
};

template <UnitKind kKind>
KVO_AVX2 Parted part(__m256i words) noexcept {
    if constexpr (kKind == UnitKind::pair) {
        const __m256i byte = _mm256_set1_epi16(0xff);
        const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(words, 3), _mm256_set1_epi16(0x0f0f));
        const __m256i lower = _mm256_or_si256(_mm256_and_si256(words, _mm256_set1_epi16(0x0707)),
                                              _mm256_and_si256(_mm256_srli_epi16(words, 4), _mm256_set1_epi16(0x0808)));
        return {_mm256_and_si256(_mm256_or_si256(upper, _mm256_srli_epi16(upper, 4)), byte),
                _mm256_and_si256(_mm256_or_si256(lower, _mm256_srli_epi16(lower, 4)), byte)};
    } else {
        return {_mm256_and_si256(_mm256_srli_epi16(words, 7), _mm256_set1_epi16(0xff)),
                _mm256_or_si256(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)),
                                _mm256_and_si256(_mm256_srli_epi16(words, 8), _mm256_set1_epi16(0x80)))};
    }
}

constexpr int kInOrder = 0xd8;  // the quarters of what was packed within halves
// A record comes from memory, and the processor looks ahead within a page only.
constexpr std::size_t kBytesAhead = 2048;

template <UnitKind kKind>
KVO_AVX2 void split_words(const std::uint8_t* source, std::size_t units, std::uint8_t* symbols,
                          std::uint8_t* rest) noexcept {
    for (std::size_t i = 0; i < units; i += kLanes) {
        _mm_prefetch(reinterpret_cast<const char*>(source + 2 * i) + kBytesAhead, _MM_HINT_T0);
        const Parted a = part<kKind>(load(source + 2 * i)), b = part<kKind>(load(source + 2 * i + 32));
        store(symbols + i, _mm256_permute4x64_epi64(_mm256_packus_epi16(a.symbols, b.symbols), kInOrder));
        store(rest + i, _mm256_permute4x64_epi64(_mm256_packus_epi16(a.rest, b.rest), kInOrder));
    }
}

KVO_AVX2 void split_avx2(UnitKind kind, const std::uint8_t* source, std::size_t units, std::uint8_t* symbols,
                         std::uint8_t* rest) {
    if (kind == UnitKind::word) {
        split_words<UnitKind::word>(source, units, symbols, rest);
    } else if (kind == UnitKind::pair) {
        split_words<UnitKind::pair>(source, units, symbols, rest);
    } else {
        codec_loops::split(kind, source, units, symbols, rest);
    }
}

// Sixteen units of symbols and rest in the lower bytes of words.
template <UnitKind kKind>
KVO_AVX2 __m256i unite(__m256i symbols, __m256i rest) noexcept {
    if constexpr (kKind == UnitKind::pair) {
        const __m256i upper =
            _mm256_and_si256(_mm256_or_si256(symbols, _mm256_slli_epi16(symbols, 4)), _mm256_set1_epi16(0x0f0f));
        const __m256i lower = _mm256_or_si256(rest, _mm256_slli_epi16(rest, 4));
        return _mm256_or_si256(
            _mm256_slli_epi16(upper, 3),
            _mm256_or_si256(_mm256_and_si256(lower, _mm256_set1_epi16(0x0707)),
                            _mm256_slli_epi16(_mm256_and_si256(lower, _mm256_set1_epi16(0x0808)), 4)));
    } else {
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(rest, _mm256_set1_epi16(0x80)), 8);
        const __m256i fraction = _mm256_and_si256(rest, _mm256_set1_epi16(0x7f));
        return _mm256_or_si256(_mm256_or_si256(sign, fraction), _mm256_slli_epi16(symbols, 7));
    }
}

template <UnitKind kKind>
KVO_AVX2 __m256i raise(__m256i symbols, __m256i heights) noexcept {
    if constexpr (kKind == UnitKind::pair) {
        const __m256i low = _mm256_set1_epi8(0x0f), high = _mm256_set1_epi8(static_cast<char>(0xf0));
        return _mm256_or_si256(
            _mm256_and_si256(_mm256_add_epi8(_mm256_and_si256(symbols, low), _mm256_and_si256(heights, low)), low),
            _mm256_add_epi8(_mm256_and_si256(symbols, high), _mm256_and_si256(heights, high)));
    } else {
        return _mm256_add_epi8(symbols, heights);
    }
}

template <UnitKind kKind>
KVO_AVX2 void join_words(const std::uint8_t* symbols, const std::uint8_t* rest, std::size_t units,
                         const ColumnHeights& heights, std::size_t column, std::uint8_t* target) noexcept {
    for (std::size_t i = 0; i < units; i += kLanes) {
        _mm_prefetch(reinterpret_cast<const char*>(rest + i) + kBytesAhead / 2, _MM_HINT_T0);
        __m256i symbol = load(symbols + i);
        if (heights.columns > 0) {
            symbol = raise<kKind>(symbol, load(heights.height.data() + column));
            column = column + kLanes == heights.columns ? 0 : column + kLanes;
        }
        const __m256i lower = load(rest + i);
        const auto half = [&](int which) KVO_AVX2 {
            const __m128i s = which == 0 ? _mm256_castsi256_si128(symbol) : _mm256_extracti128_si256(symbol, 1);
            const __m128i r = which == 0 ? _mm256_castsi256_si128(lower) : _mm256_extracti128_si256(lower, 1);
            return unite<kKind>(_mm256_cvtepu8_epi16(s), _mm256_cvtepu8_epi16(r));
        };
        store(target + 2 * i, half(0));
        store(target + 2 * i + 32, half(1));
    }
}

KVO_AVX2 void join_avx2(UnitKind kind, const std::uint8_t* symbols, const std::uint8_t* rest, std::size_t all,
                        std::size_t first, std::size_t units, const ColumnHeights& heights, std::size_t column,
                        std::uint8_t* target) {
    if (kind == UnitKind::word) {
        join_words<UnitKind::word>(symbols, rest + first, units, heights, column, target);
    } else if (kind == UnitKind::pair) {
        join_words<UnitKind::pair>(symbols, rest + first, units, heights, column, target);
    } else {
        codec_loops::join(kind, symbols, rest, all, first, units, heights, column, target);
    }
}

// Medians of 32 columns of bytes, as codec_loops::measure_lanes takes them; `shift` chooses a part of four bits.
KVO_AVX2 __m256i find_medians(const std::uint8_t* symbols, std::size_t rows, std::size_t columns, __m256i mask,
                              int shift) noexcept {
    const __m128i count = _mm_cvtsi32_si128(shift);
    const auto row_at = [&](std::size_t row) KVO_AVX2 {
        return _mm256_and_si256(_mm256_srl_epi16(load(symbols + row * columns), count), mask);
    };
    alignas(32) std::array<std::uint16_t, kLanes> sums{};
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (std::size_t row = 0; row < rows; ++row) {
        const __m256i own = row_at(row);
        even = _mm256_add_epi16(even, _mm256_and_si256(own, _mm256_set1_epi16(0xff)));
        odd = _mm256_add_epi16(odd, _mm256_srli_epi16(own, 8));
    }
    store(sums.data(), even);
    store(sums.data() + kLanes / 2, odd);
    alignas(32) std::array<std::uint8_t, kLanes> means{};
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const unsigned sum = sums[lane % 2 * (kLanes / 2) + lane / 2];
        means[lane] = static_cast<std::uint8_t>(rows == kStripRows ? (sum + kStripRows / 2) / kStripRows
                                                                   : (sum + rows / 2) / rows);
    }
    const __m256i mean = load(means.data());
    __m256i not_above = _mm256_setzero_si256();
    for (std::size_t row = 0; row < rows; ++row) {
        const __m256i own = row_at(row);
        not_above = _mm256_sub_epi8(not_above, _mm256_cmpeq_epi8(_mm256_min_epu8(own, mean), own));
    }
    // More than half are above: fewer than half are not.
    const __m256i half = _mm256_set1_epi8(static_cast<char>((rows + 1) / 2));
    return _mm256_sub_epi8(mean, _mm256_cmpgt_epi8(half, not_above));
}

KVO_AVX2 void measure_avx2(UnitKind kind, const std::uint8_t* symbols, std::size_t rows, ColumnHeights& heights) {
    for (std::size_t from = 0; from < heights.columns; from += kLanes) {
        const std::uint8_t* const own = symbols + from;
        __m256i result;
        if (kind == UnitKind::pair) {
            const __m256i low = _mm256_set1_epi8(0x0f), centre = _mm256_set1_epi8(8);
            const __m256i first =
                _mm256_and_si256(_mm256_sub_epi8(find_medians(own, rows, heights.columns, low, 0), centre), low);
            const __m256i second =
                _mm256_and_si256(_mm256_sub_epi8(find_medians(own, rows, heights.columns, low, 4), centre), low);
            result = _mm256_or_si256(first, _mm256_slli_epi16(second, 4));
        } else {
            const __m256i medians = find_medians(own, rows, heights.columns, _mm256_set1_epi8(-1), 0);
            result = _mm256_sub_epi8(medians, _mm256_set1_epi8(static_cast<char>(128)));
        }
        store(heights.height.data() + from, result);
    }
}

KVO_AVX2 void lower_avx2(UnitKind kind, std::uint8_t* symbols, std::size_t units, const ColumnHeights& heights) {
    const __m256i low = _mm256_set1_epi8(0x0f), high = _mm256_set1_epi8(static_cast<char>(0xf0));
    std::size_t column = 0;
    for (std::size_t at = 0; at < units; at += kLanes) {
        const __m256i symbol = load(symbols + at), height = load(heights.height.data() + column);
        __m256i lowered = _mm256_sub_epi8(symbol, height);
        if (kind == UnitKind::pair) {
            lowered = _mm256_or_si256(
                _mm256_and_si256(_mm256_sub_epi8(_mm256_and_si256(symbol, low), _mm256_and_si256(height, low)), low),
                _mm256_sub_epi8(_mm256_and_si256(symbol, high), _mm256_and_si256(height, high)));
        }
        store(symbols + at, lowered);
        column = column + kLanes == heights.columns ? 0 : column + kLanes;
    }
}

KVO_AVX2 __m256i multiply_high(__m256i a, __m256i b) noexcept {
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, odd, 0xaa);
}

// Entries of four states, and of eight. Loads of their own are faster than gathers.
[[gnu::always_inline]] KVO_AVX2 inline __m128i load_entries(const DecodeTable& table, __m128i places) noexcept {
    const auto entry = [&](std::uint64_t place) KVO_AVX2 { return static_cast<int>(table.entries[place]); };
    const auto first = static_cast<std::uint64_t>(_mm_cvtsi128_si64(places));
    const auto last = static_cast<std::uint64_t>(_mm_extract_epi64(places, 1));
    return _mm_setr_epi32(entry(first & 0xffffffff), entry(first >> 32), entry(last & 0xffffffff), entry(last >> 32));
}

[[gnu::always_inline]] KVO_AVX2 inline __m256i load_entries(const DecodeTable& table, __m256i places) noexcept {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_entries(table, _mm256_castsi256_si128(places))),
                                   load_entries(table, _mm256_extracti128_si256(places, 1)), 1);
}

// The rules of two symbols. Loads of their own take half the time of gathers.
KVO_AVX2 __m128i load_rules(const EncodeTable& table, const std::uint8_t* symbols) noexcept {
    return _mm_set_epi64x(static_cast<long long>(table.rules[symbols[1]]),
                          static_cast<long long>(table.rules[symbols[0]]));
}

// The rules of symbols 0, 1, `second` and the one behind it.
KVO_AVX2 __m256i load_rules(const EncodeTable& table, const std::uint8_t* symbols, std::size_t second) noexcept {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_rules(table, symbols)),
                                   load_rules(table, symbols + second), 1);
}

KVO_AVX2 std::uint8_t* encode_avx2(const EncodeTable& table, const std::uint8_t* symbols, std::size_t units,
                                   LaneStates& states, std::uint8_t* words_end) {
    __m256i state[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) {
        state[v] = load(states.data() + v * kVectorLanes);
    }
    const __m256i field = _mm256_set1_epi32(0xfff), all = _mm256_set1_epi32(kTableParts);
    const __m256i one = _mm256_set1_epi32(1), word = _mm256_set1_epi32(0xffff);
    for (std::size_t at = units; at > 0; at -= kLanes) {
#pragma GCC unroll 4
        for (std::size_t v = kVectors; v-- > 0;) {
            const std::uint8_t* const own = symbols + at - kLanes + v * kVectorLanes;
            // Two of either half, so that what they are shuffled to is in order.
            const __m256 first = _mm256_castsi256_ps(load_rules(table, own, 4));
            const __m256 second = _mm256_castsi256_ps(load_rules(table, own + 2, 4));
            const __m256i factor = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88));
            const __m256i rule = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd));
            const __m256i parts = _mm256_and_si256(_mm256_srli_epi32(rule, 12), field);
            const __m256i limit = _mm256_sub_epi32(_mm256_slli_epi32(parts, 31 - kTableBits), one);
            const __m256i is_full = _mm256_cmpgt_epi32(state[v], limit);
            const unsigned mask = signs_of(is_full);
            const __m256i given =
                _mm256_permutevar8x32_epi32(_mm256_and_si256(state[v], word), load_order(kGiven, mask));
            const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(given), _mm256_extracti128_si256(given, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(words_end - kSlack), words);
            words_end -= 2 * std::popcount(mask);
            const __m256i left = _mm256_blendv_epi8(state[v], _mm256_srli_epi32(state[v], 16), is_full);
            const __m256i quotient = _mm256_srlv_epi32(multiply_high(left, factor), _mm256_srli_epi32(rule, 24));
            const __m256i grown = _mm256_mullo_epi32(quotient, _mm256_sub_epi32(all, parts));
            state[v] = _mm256_add_epi32(_mm256_add_epi32(left, _mm256_and_si256(rule, field)), grown);
        }
    }
    for (std::size_t v = 0; v < kVectors; ++v) {
        store(states.data() + v * kVectorLanes, state[v]);
    }
    return words_end;
}

KVO_AVX2 bool decode_stream_avx2(SymbolStream& stream, std::uint8_t* symbols, std::size_t units) noexcept {
    const DecodeTable& table = stream.table;
    WordCursor& words = stream.words;
    LaneStates& states = stream.states;
    __m256i state[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) {
        state[v] = load(states.data() + v * kVectorLanes);
    }
    const __m256i place = _mm256_set1_epi32(kTableParts - 1), field = _mm256_set1_epi32(0xfff);
    const __m256i low = _mm256_set1_epi32(kStateLow), byte = _mm256_set1_epi32(0xff);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const std::uint8_t* at = words.at;
    std::size_t done = 0;
    for (; done < units && words.end - at >= static_cast<std::ptrdiff_t>(2 * kLanes + kSlack); done += kLanes) {
        __m256i symbol[kVectors];
#pragma GCC unroll 4
        for (std::size_t v = 0; v < kVectors; ++v) {
            const __m256i entry = load_entries(table, _mm256_and_si256(state[v], place));
            symbol[v] = _mm256_and_si256(entry, byte);
            const __m256i parts = _mm256_and_si256(_mm256_srli_epi32(entry, 8), field);
            const __m256i next = _mm256_add_epi32(_mm256_mullo_epi32(parts, _mm256_srli_epi32(state[v], kTableBits)),
                                                  _mm256_srli_epi32(entry, 20));
            const __m256i is_low = _mm256_cmpgt_epi32(low, next);
            const unsigned mask = signs_of(is_low);
            const __m256i taken = _mm256_permutevar8x32_epi32(
                _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))), load_order(kTaken, mask));
            at += 2 * std::popcount(mask);
            state[v] = _mm256_blendv_epi8(next, _mm256_or_si256(_mm256_slli_epi32(next, 16), taken), is_low);
        }
        const __m256i packed =
            _mm256_packus_epi16(_mm256_packus_epi32(symbol[0], symbol[1]), _mm256_packus_epi32(symbol[2], symbol[3]));
        store(symbols + done, _mm256_permutevar8x32_epi32(packed, in_order));
    }
    words.at = at;
    for (std::size_t v = 0; v < kVectors; ++v) {
        store(states.data() + v * kVectorLanes, state[v]);
    }
    return codec_loops::decode_stream(stream, symbols + done, units - done);
}

bool decode_avx2(std::span<SymbolStream* const> streams, std::uint8_t* symbols, std::size_t units) noexcept {
    return std::ranges::all_of(streams, [&](SymbolStream* stream) {
        const bool is_whole = decode_stream_avx2(*stream, symbols, units);
        symbols += units;
        return is_whole;
    });
}

#undef KVO_AVX2
#define KVO_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,bmi,bmi2,popcnt")))

constexpr std::size_t kWideLanes = 16;
constexpr std::size_t kWideVectors = kLanes / kWideLanes;
constexpr std::size_t kWideSlack = 32;

// The rules of eight symbols.
KVO_AVX512 __m512i load_wide_rules(const EncodeTable& table, const std::uint8_t* symbols) noexcept {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_rules(table, symbols, 2)), load_rules(table, symbols + 4, 2),
                              1);
}

KVO_AVX512 std::uint8_t* encode_avx512(const EncodeTable& table, const std::uint8_t* symbols, std::size_t units,
                                       LaneStates& states, std::uint8_t* words_end) {
    __m512i state[kWideVectors];
    for (std::size_t v = 0; v < kWideVectors; ++v) {
        state[v] = _mm512_loadu_si512(states.data() + v * kWideLanes);
    }
    const __m512i field = _mm512_set1_epi32(0xfff), all = _mm512_set1_epi32(kTableParts);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i evens = _mm512_slli_epi32(lanes, 1);
    constexpr __mmask16 kOdd = 0xaaaa;
    for (std::size_t at = units; at > 0; at -= kLanes) {
#pragma GCC unroll 2
        for (std::size_t v = kWideVectors; v-- > 0;) {
            const std::uint8_t* const own = symbols + at - kLanes + v * kWideLanes;
            const __m512i low = load_wide_rules(table, own), high = load_wide_rules(table, own + kWideLanes / 2);
            const __m512i factor = _mm512_permutex2var_epi32(low, evens, high);
            const __m512i rule = _mm512_permutex2var_epi32(low, _mm512_or_si512(evens, _mm512_set1_epi32(1)), high);
            const __m512i parts = _mm512_and_si512(_mm512_srli_epi32(rule, 12), field);
            const __mmask16 is_full = _mm512_cmpge_epu32_mask(state[v], _mm512_slli_epi32(parts, 31 - kTableBits));
            const int count = std::popcount(static_cast<unsigned>(is_full));
            const __m512i first = _mm512_maskz_compress_epi32(is_full, state[v]);
            const __m512i last = _mm512_permutexvar_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(count)), first);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(words_end - kWideSlack), _mm512_cvtepi32_epi16(last));
            words_end -= 2 * count;
            const __m512i left = _mm512_mask_srli_epi32(state[v], is_full, state[v], 16);
            const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(left, factor), 32);
            const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(left, 32), _mm512_srli_epi64(factor, 32));
            const __m512i quotient =
                _mm512_srlv_epi32(_mm512_mask_mov_epi32(even, kOdd, odd), _mm512_srli_epi32(rule, 24));
            const __m512i grown = _mm512_mullo_epi32(quotient, _mm512_sub_epi32(all, parts));
            state[v] = _mm512_add_epi32(_mm512_add_epi32(left, _mm512_and_si512(rule, field)), grown);
        }
    }
    for (std::size_t v = 0; v < kWideVectors; ++v) {
        _mm512_storeu_si512(states.data() + v * kWideLanes, state[v]);
    }
    return words_end;
}

[[gnu::always_inline]] KVO_AVX512 inline __m512i load_entries(const DecodeTable& table, __m512i places) noexcept {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_entries(table, _mm512_castsi512_si256(places))),
                              load_entries(table, _mm512_extracti64x4_epi64(places, 1)), 1);
}

// Decodes several streams in turn: each step of a stream waits for its last one, and steps of the others fill that
// time.
template <std::size_t kCount>
KVO_AVX512 bool decode_turns(std::span<SymbolStream* const> streams, std::uint8_t* symbols,
                             std::size_t units) noexcept {
    constexpr std::ptrdiff_t kReach = 2 * kLanes + kWideSlack;
    __m512i state[kCount][kWideVectors];
    const std::uint8_t *at[kCount], *last[kCount];
    const DecodeTable* table[kCount];
    for (std::size_t i = 0; i < kCount; ++i) {
        at[i] = streams[i]->words.at;
        last[i] = streams[i]->words.end - kReach;
        table[i] = &streams[i]->table;
        for (std::size_t v = 0; v < kWideVectors; ++v) {
            state[i][v] = _mm512_loadu_si512(streams[i]->states.data() + v * kWideLanes);
        }
    }
    const __m512i place = _mm512_set1_epi32(kTableParts - 1), field = _mm512_set1_epi32(0xfff);
    const __m512i low = _mm512_set1_epi32(kStateLow);
    std::size_t done = 0;
    for (; done < units && at[0] <= last[0] && at[kCount - 1] <= last[kCount - 1]; done += kLanes) {
#pragma GCC unroll 2
        for (std::size_t v = 0; v < kWideVectors; ++v) {
#pragma GCC unroll 2
            for (std::size_t i = 0; i < kCount; ++i) {
                __m512i& own = state[i][v];
                const __m512i entry = load_entries(*table[i], _mm512_and_si512(own, place));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + i * units + done + v * kWideLanes),
                                 _mm512_cvtepi32_epi8(entry));
                const __m512i parts = _mm512_and_si512(_mm512_srli_epi32(entry, 8), field);
                const __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(parts, _mm512_srli_epi32(own, kTableBits)),
                                                      _mm512_srli_epi32(entry, 20));
                const __mmask16 is_low = _mm512_cmplt_epu32_mask(next, low);
                const __m512i ahead =
                    _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at[i])));
                const __m512i taken = _mm512_maskz_expand_epi32(is_low, ahead);
                at[i] += 2 * std::popcount(static_cast<unsigned>(is_low));
                own = _mm512_or_si512(_mm512_mask_slli_epi32(next, is_low, next, 16), taken);
            }
        }
    }
    bool is_whole = true;
    for (std::size_t i = 0; i < kCount; ++i) {
        streams[i]->words.at = at[i];
        for (std::size_t v = 0; v < kWideVectors; ++v) {
            _mm512_storeu_si512(streams[i]->states.data() + v * kWideLanes, state[i][v]);
        }
        is_whole &= codec_loops::decode_stream(*streams[i], symbols + i * units + done, units - done);
    }
    return is_whole;
}

KVO_AVX512 bool decode_avx512(std::span<SymbolStream* const> streams, std::uint8_t* symbols,
                              std::size_t units) noexcept {
    return streams.size() == kMaxStreams ? decode_turns<kMaxStreams>(streams, symbols, units)
                                         : decode_turns<1>(streams, symbols, units);
}

#undef KVO_AVX512

}  // namespace

const CodecPath kAvx512Codec = {"avx512",     kMaxStreams, split_avx2,    join_avx2,
                                measure_avx2, lower_avx2,  encode_avx512, decode_avx512};

const CodecPath kAvx2Codec = {"avx2", 1, split_avx2, join_avx2, measure_avx2, lower_avx2, encode_avx2, decode_avx2};

}  // namespace kvo

#endif
