#include <algorithm>
#include <cstring>

#include "codec/codec_loops.hpp"
#include "codec/coded_form.hpp"
#include "shim/cpu_features.hpp"

namespace kvo {
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

}  // namespace kvo
