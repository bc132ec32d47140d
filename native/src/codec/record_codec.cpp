#include "codec/codec_paths.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "codec/codec_paths.hpp"
#include "shim/cpu_features.hpp"

namespace kvo {
namespace {

constexpr std::size_t kPlaces = 8;
constexpr std::size_t kPlaceUnits = 512;
constexpr std::size_t kReach = 256;  // units of a place whose columns are compared
constexpr std::array<std::size_t, 14> kColumns = {32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 576, 640, 768, 1024};
constexpr double kWorthBits = 0.97;    // of a unit's bits: columns that are lowered make up for some more
constexpr double kAlikeEnough = 0.97;  // of the distance of units that have nothing to do with each other
constexpr double kNearlyBest = 1.03;

// Places that are spread over the record, each of whole units.
template <typename Act>
void visit(std::size_t units, std::size_t length, const Act& act) {
    const std::size_t own = std::min(length, units);
    const std::size_t places = std::clamp<std::size_t>(units / length, 1, kPlaces);
    const std::size_t step = places == 1 ? 0 : (units - own) / (places - 1);
    for (std::size_t place = 0; place < places; ++place) {
        act(place * step, own);
    }
}

// Bits of a unit, as far as counts of the sample's symbols say.
double estimate_bits(std::span<const std::uint8_t> record, UnitKind kind) {
    std::array<std::uint32_t, 256> counts{};
    std::array<std::uint8_t, kPlaceUnits> symbols{};
    std::array<std::uint8_t, 3 * kPlaceUnits> rest{};
    double total = 0;
    visit(record.size() / unit_bytes(kind), kPlaceUnits, [&](std::size_t first, std::size_t units) {
        codec_loops::split(kind, record.data() + first * unit_bytes(kind), units, symbols.data(), rest.data());
        for (std::size_t i = 0; i < units; ++i) {
            ++counts[symbols[i]];
        }
        total += static_cast<double>(units);
    });
    double bits = 0, seen = 0;
    for (const std::uint32_t count : counts) {
        if (count > 0) {
            bits -= count * std::log2(count / total);
            ++seen;
        }
    }
    const double bias = (seen - 1) * 0.72;  // in nats half a symbol each: a sample looks simpler than it is
    return static_cast<double>(8 * rest_bytes(kind)) + (bits + bias) / total;
}

// How far `length` symbols are from others, as a compiler turns it into vector instructions.
template <UnitKind kKind>
unsigned measure_distance(const std::uint8_t* one, const std::uint8_t* other, std::size_t length) {
    unsigned sum = 0;
    for (std::size_t i = 0; i < length; ++i) {
        if constexpr (kKind == UnitKind::pair) {
            sum += static_cast<unsigned>(std::abs((one[i] & 15) - (other[i] & 15)) +
                                         std::abs((one[i] >> 4) - (other[i] >> 4)));
        } else {
            sum += static_cast<unsigned>(std::min(std::abs(one[i] - other[i]), 16));
        }
    }
    return sum;
}

unsigned measure_distance(UnitKind kind, const std::uint8_t* symbols, std::size_t shift) {
    return kind == UnitKind::pair ? measure_distance<UnitKind::pair>(symbols, symbols + shift, kReach)
                                  : measure_distance<UnitKind::word>(symbols, symbols + shift, kReach);
}

// After how many units there are such as they were.
std::size_t find_columns(std::span<const std::uint8_t> record, UnitKind kind) {
    constexpr std::size_t kLongest = kColumns.back();
    constexpr std::array<std::size_t, 3> kUnlike = {37, 75, 139};
    std::array<std::uint8_t, kReach + kLongest> symbols{};
    std::array<std::uint8_t, 3 * (kReach + kLongest)> rest{};
    std::array<std::uint64_t, kColumns.size()> distances{};
    std::uint64_t unlike = 0;
    const std::size_t units = record.size() / unit_bytes(kind);
    if (units < kReach + kLongest) {
        return 0;
    }
    visit(units, kReach + kLongest, [&](std::size_t first, std::size_t own) {
        codec_loops::split(kind, record.data() + first * unit_bytes(kind), own, symbols.data(), rest.data());
        for (std::size_t candidate = 0; candidate < kColumns.size(); ++candidate) {
            distances[candidate] += measure_distance(kind, symbols.data(), kColumns[candidate]);
        }
        for (const std::size_t shift : kUnlike) {
            unlike += measure_distance(kind, symbols.data(), shift);
        }
    });
    const auto best = static_cast<double>(*std::ranges::min_element(distances));
    if (best >= kAlikeEnough * static_cast<double>(unlike) / kUnlike.size()) {
        return 0;
    }
    const auto first = std::ranges::find_if(
        distances, [best](std::uint64_t one) { return static_cast<double>(one) <= kNearlyBest * best; });
    return kColumns[static_cast<std::size_t>(first - distances.begin())];
}

}  // namespace

std::optional<CodePlan> plan_code(std::span<const std::uint8_t> record) {
    if (record.size() < 4 * kLanes) {
        return std::nullopt;
    }
    CodePlan plan;
    double best = 1.0;
    for (const UnitKind kind : {UnitKind::word, UnitKind::pair, UnitKind::wide}) {
        const double share = estimate_bits(record, kind) / static_cast<double>(8 * unit_bytes(kind));
        if (share < best) {
            best = share;
            plan.kind = kind;
        }
    }
    if (best > kWorthBits) {
        return std::nullopt;
    }
    plan.columns = find_columns(record, plan.kind);
    return plan;
}

namespace {

constexpr std::uint64_t kWorth = 95;     // percent of the record's bytes
constexpr std::size_t kWordsSlack = 32;  // that a path may write before its words

// The lowest height and what each column has above it, at most 15; the heights become what the reader will have.
std::uint8_t* write_heights(UnitKind kind, ColumnHeights& heights, std::uint8_t* target) {
    const std::size_t columns = heights.columns;
    if (kind == UnitKind::pair) {
        return std::copy_n(heights.height.begin(), columns, target);
    }
    constexpr int kCentre = 128, kMostAbove = 15;
    int highest = 0;
    for (std::size_t i = 0; i < columns; ++i) {
        heights.height[i] = static_cast<std::uint8_t>(heights.height[i] + kCentre);
        highest = std::max<int>(highest, heights.height[i]);
    }
    const int lowest = std::max(highest - kMostAbove, 0);
    *target++ = static_cast<std::uint8_t>(lowest);
    for (std::size_t i = 0; i < columns; i += 2) {
        const int even = std::max(heights.height[i] - lowest, 0), odd = std::max(heights.height[i + 1] - lowest, 0);
        *target++ = static_cast<std::uint8_t>(even | odd << 4);
        heights.height[i] = static_cast<std::uint8_t>(lowest + even - kCentre);
        heights.height[i + 1] = static_cast<std::uint8_t>(lowest + odd - kCentre);
    }
    return target;
}

std::uint8_t* write_strips(const CodecPath& path, const CodePlan& plan, std::span<std::uint8_t> symbols,
                           std::uint8_t* target) {
    ColumnHeights heights;
    heights.columns = plan.columns;
    const std::size_t strip = strip_units(plan.columns);
    for (std::size_t at = 0; plan.columns > 0 && at < symbols.size(); at += strip) {
        const std::size_t units = std::min(strip, symbols.size() - at);
        const std::size_t rows = units / plan.columns;
        if (rows == 0) {
            heights.height.fill(0);
        } else {
            path.measure(plan.kind, symbols.data() + at, rows, heights);
        }
        target = write_heights(plan.kind, heights, target);
        path.lower(plan.kind, symbols.data() + at, units, heights);
    }
    return target;
}

}  // namespace

RecordEncoder::RecordEncoder() : RecordEncoder(codec_paths().front()) {}

std::span<const std::uint8_t> RecordEncoder::encode(std::span<const std::uint8_t> record) {
    const std::optional<CodePlan> plan =
        record.size() <= kMaxCodedRecordBytes ? plan_code(record) : std::optional<CodePlan>();
    if (!plan) {
        return {};
    }
    const std::size_t bytes = unit_bytes(plan->kind), chunk = chunk_units(plan->columns);
    const std::size_t units = record.size() / bytes / kLanes * kLanes;
    const std::size_t chunks = (units + chunk - 1) / chunk;
    // Room for the coded form of a chunk that does not shrink: it is written first, and found too long afterwards.
    const std::size_t most_heights = (kChunkUnits / kStripRows + kMaxColumns) * 2;
    const std::size_t most_chunk =
        kMaxTableBytes + most_heights + kStateBytes + chunk * (rest_bytes(plan->kind) + 2) + kChunkHeadBytes;
    coded_.resize(std::max(coded_.size(), sizeof(CodedHead) + record.size() + chunks * kChunkHeadBytes + most_chunk));
    symbols_.resize(kChunkUnits);
    words_.resize(2 * kChunkUnits + kWordsSlack);

    CodedHead head;
    head.kind = plan->kind;
    head.column_groups = static_cast<std::uint8_t>(plan->columns / kLanes);
    head.length = record.size();
    std::uint8_t* target = coded_.data();
    codec_loops::store(target, head);
    target += sizeof head;
    for (std::size_t first = 0; first < units; first += chunk) {
        const std::size_t own = std::min(chunk, units - first);
        const std::uint8_t* const source = record.data() + first * bytes;
        const std::span<std::uint8_t> symbols = std::span(symbols_).first(own);
        std::uint8_t* const begin = target + kChunkHeadBytes;
        // The rest has its place before the heights, whose number is known, and the table, whose length is not.
        path_.split(plan->kind, source, own, symbols.data(), begin);
        std::uint8_t* at = begin + own * rest_bytes(plan->kind);
        at = write_strips(path_, *plan, symbols, at);
        const SymbolParts parts = count_parts(symbols);
        at += write_parts(parts, at);
        LaneStates states;
        states.fill(kStateLow);
        std::uint8_t* const words_end = words_.data() + words_.size();
        const std::uint8_t* const words =
            path_.encode(make_encode_table(parts), symbols.data(), own, states, words_end);
        std::memcpy(at, states.data(), kStateBytes);
        at = std::copy(words, static_cast<const std::uint8_t*>(words_end), at + kStateBytes);
        auto length = static_cast<std::uint32_t>(at - begin);
        if (length >= own * bytes) {
            length = static_cast<std::uint32_t>(own * bytes) | kIsPlain;
            at = std::copy_n(source, own * bytes, begin);
        }
        codec_loops::store(target, length);
        target = at;
    }
    target = std::copy(record.begin() + static_cast<std::ptrdiff_t>(units * bytes), record.end(), target);
    const auto length = static_cast<std::size_t>(target - coded_.data());
    return length * 100 <= record.size() * kWorth ? std::span<const std::uint8_t>(coded_).first(length)
                                                  : std::span<const std::uint8_t>();
}

namespace {

constexpr std::size_t kPieceUnits =
    512;  // whose symbols stay in the cache with the tables until they are joined with the rest

using Bytes = std::span<const std::uint8_t>;

// The first `length` bytes, of which there must be so many.
Bytes take(Bytes& bytes, std::size_t length) noexcept {
    const Bytes taken = bytes.first(length);
    bytes = bytes.subspan(length);
    return taken;
}

void read_heights(UnitKind kind, Bytes bytes, ColumnHeights& heights) noexcept {
    if (kind == UnitKind::pair) {
        std::ranges::copy(bytes, heights.height.begin());
        return;
    }
    constexpr unsigned kCentre = 128;
    for (std::size_t i = 0; i < heights.columns; ++i) {
        const unsigned above = bytes[1 + i / 2] >> (i % 2 * 4) & 0x0f;
        heights.height[i] = static_cast<std::uint8_t>(bytes[0] + above - kCentre);
    }
}

// A chunk that is being decoded.
struct ChunkReader {
    SymbolStream stream;
    Bytes rest, all_heights;
    ColumnHeights heights;
    std::span<std::uint8_t> target;  // whole groups of units

    bool open(const CodedHead& head, Bytes chunk) noexcept;
    bool is_at_end() const noexcept {
        return stream.words.at == stream.words.end &&
               std::ranges::all_of(stream.states, [](std::uint32_t one) { return one == kStateLow; });
    }
};

std::size_t units_of_strip(const CodedHead& head, std::size_t units) noexcept {
    return head.column_groups == 0 ? units : strip_units(head.columns());
}

bool ChunkReader::open(const CodedHead& head, Bytes chunk) noexcept {
    const std::size_t units = target.size() / unit_bytes(head.kind), strip = units_of_strip(head, units);
    const std::size_t heights_length = (units + strip - 1) / strip * height_bytes(head.kind, head.columns());
    const std::size_t rest_length = units * rest_bytes(head.kind);
    if (chunk.size() < rest_length + heights_length) {
        return false;
    }
    rest = take(chunk, rest_length);
    all_heights = take(chunk, heights_length);
    heights.columns = head.columns();
    const std::optional<SymbolParts> parts = read_parts(chunk);
    if (!parts || chunk.size() < kStateBytes) {
        return false;
    }
    make_decode_table(*parts, stream.table);
    std::memcpy(stream.states.data(), take(chunk, kStateBytes).data(), kStateBytes);
    stream.words = {chunk.data(), chunk.data() + chunk.size()};
    return std::ranges::none_of(stream.states, [](std::uint32_t one) { return one < kStateLow || one >> 31 != 0; });
}

// Chunks of equal length, no more than the path has streams.
bool decode_chunks(const CodecPath& path, const CodedHead& head, std::span<ChunkReader> chunks) noexcept {
    const std::size_t bytes = unit_bytes(head.kind), columns = head.columns();
    const std::size_t units = chunks.front().target.size() / bytes, strip = units_of_strip(head, units);
    std::array<SymbolStream*, kMaxStreams> streams{};
    std::ranges::transform(chunks, streams.begin(), [](ChunkReader& chunk) { return &chunk.stream; });
    std::array<std::uint8_t, kMaxStreams * kPieceUnits> symbols;
    for (std::size_t begin = 0; begin < units; begin += strip) {
        const std::size_t end = std::min(begin + strip, units);
        for (ChunkReader& chunk : chunks) {
            read_heights(head.kind, take(chunk.all_heights, height_bytes(head.kind, columns)), chunk.heights);
        }
        for (std::size_t at = begin; at < end; at += kPieceUnits) {
            const std::size_t own = std::min(kPieceUnits, end - at);
            if (!path.decode(std::span(streams).first(chunks.size()), symbols.data(), own)) {
                return false;
            }
            for (std::size_t i = 0; i < chunks.size(); ++i) {
                path.join(head.kind, symbols.data() + i * own, chunks[i].rest.data(), units, at, own, chunks[i].heights,
                          columns == 0 ? 0 : (at - begin) % columns, chunks[i].target.data() + at * bytes);
            }
        }
    }
    return std::ranges::all_of(chunks, &ChunkReader::is_at_end);
}

bool is_head(const CodedHead& head, std::size_t length) noexcept {
    return head.version == kCodecVersion && head.kind >= UnitKind::word && head.kind <= UnitKind::wide &&
           head.columns() <= kMaxColumns && head.zero == 0 && head.reserved == 0 && head.length == length;
}

}  // namespace

bool decode_record(Bytes coded, std::span<std::uint8_t> record, const CodecPath& path) noexcept {
    CodedHead head;
    if (coded.size() < sizeof head) {
        return false;
    }
    std::memcpy(&head, take(coded, sizeof head).data(), sizeof head);
    if (!is_head(head, record.size())) {
        return false;
    }
    const std::size_t bytes = unit_bytes(head.kind), chunk = chunk_units(head.columns());
    std::array<ChunkReader, kMaxStreams> chunks;
    std::size_t open = 0;
    const auto decode_open = [&] {
        const std::span<ChunkReader> own = std::span(chunks).first(open);
        open = 0;
        return own.empty() || decode_chunks(path, head, own);
    };
    for (std::size_t units = record.size() / bytes / kLanes * kLanes; units > 0;) {
        const std::size_t own = std::min(chunk, units) * bytes;
        if (coded.size() < kChunkHeadBytes) {
            return false;
        }
        const auto said = codec_loops::load<std::uint32_t>(take(coded, kChunkHeadBytes).data());
        const bool is_plain = (said & kIsPlain) != 0;
        const std::size_t length = said & ~kIsPlain;
        if (length > coded.size() || (is_plain && length != own)) {
            return false;
        }
        const Bytes body = take(coded, length);
        if (is_plain) {
            std::ranges::copy(body, record.begin());
        } else {
            if ((open == path.streams || (open > 0 && chunks[0].target.size() != own)) && !decode_open()) {
                return false;
            }
            chunks[open].target = record.first(own);
            if (!chunks[open++].open(head, body)) {
                return false;
            }
        }
        record = record.subspan(own);
        units -= own / bytes;
    }
    if (!decode_open() || coded.size() != record.size()) {
        return false;
    }
    std::ranges::copy(coded, record.begin());
    return true;
}

bool decode_record(Bytes coded, std::span<std::uint8_t> record) noexcept {
    return decode_record(coded, record, codec_paths().front());
}

std::span<const CodecPath> codec_paths() noexcept {
#if defined(__x86_64__)
    static const std::array paths = {kAvx512Codec, kAvx2Codec, kPortableCodec};
    const CpuFeatures& cpu = cpu_features();
    const bool has_avx2 = cpu.has(CpuFeature::avx2);
    const bool has_avx512 =
        has_avx2 && cpu.has(CpuFeature::avx512f) && cpu.has(CpuFeature::avx512bw) && cpu.has(CpuFeature::avx512vl);
    return std::span(paths).subspan(has_avx512 ? 0 : has_avx2 ? 1 : 2);
#else
    static const std::array paths = {kPortableCodec};
    return paths;
#endif
}

std::string_view name_of(const CodecPath& path) noexcept { return path.name; }

constexpr CodecPath kPortable = {"portable",           1,
                                 codec_loops::split,   codec_loops::join,
                                 codec_loops::measure, codec_loops::lower,
                                 codec_loops::encode,  codec_loops::decode};
const CodecPath kPortableCodec = kPortable;

}  // namespace kvo
