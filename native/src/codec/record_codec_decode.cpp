#include <algorithm>
#include <cstring>

#include "codec/codec_loops.hpp"
#include "codec/coded_form.hpp"
#include "shim/cpu_features.hpp"

namespace kvo {
namespace {

constexpr std::size_t kPieceUnits = 2048;  // whose symbols stay near while they are joined with the rest

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

// Its length is that of the target, whole groups of units.
bool decode_chunk(const CodecPath& path, const CodedHead& head, Bytes chunk, std::span<std::uint8_t> target) noexcept {
    const std::size_t units = target.size() / unit_bytes(head.kind), columns = head.columns();
    const std::size_t strip = columns == 0 ? units : strip_units(columns);
    const std::size_t strip_heights = height_bytes(head.kind, columns);
    const std::size_t heights_length = (units + strip - 1) / strip * strip_heights;
    const std::size_t rest_length = units * rest_bytes(head.kind);
    if (chunk.size() < rest_length + heights_length) {
        return false;
    }
    const Bytes rest = take(chunk, rest_length);
    Bytes all_heights = take(chunk, heights_length);
    const std::optional<SymbolParts> parts = read_parts(chunk);
    if (!parts || chunk.size() < kStateBytes) {
        return false;
    }
    DecodeTable table;
    make_decode_table(*parts, table);
    LaneStates states;
    std::memcpy(states.data(), take(chunk, kStateBytes).data(), kStateBytes);
    if (std::ranges::any_of(states, [](std::uint32_t one) { return one < kStateLow || one >> 31 != 0; })) {
        return false;
    }
    WordCursor words{chunk.data(), chunk.data() + chunk.size()};
    ColumnHeights heights;
    heights.columns = columns;
    std::array<std::uint8_t, kPieceUnits> symbols;
    for (std::size_t begin = 0; begin < units; begin += strip) {
        const std::size_t end = std::min(begin + strip, units);
        read_heights(head.kind, take(all_heights, strip_heights), heights);
        for (std::size_t at = begin; at < end; at += kPieceUnits) {
            const std::size_t own = std::min(kPieceUnits, end - at);
            if (!path.decode(table, words, states, symbols.data(), own)) {
                return false;
            }
            path.join(head.kind, symbols.data(), rest.data(), units, at, own, heights,
                      columns == 0 ? 0 : (at - begin) % columns, target.data() + at * unit_bytes(head.kind));
        }
    }
    return words.at == words.end && std::ranges::all_of(states, [](std::uint32_t one) { return one == kStateLow; });
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
        } else if (!decode_chunk(path, head, body, record.first(own))) {
            return false;
        }
        record = record.subspan(own);
        units -= own / bytes;
    }
    if (coded.size() != record.size()) {
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
