#include <algorithm>
#include <cstring>

#include "codec/codec_loops.hpp"
#include "codec/coded_form.hpp"
#include "codec/record_codec_sample.hpp"

namespace kvo {
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

}  // namespace kvo
