#include "codec/record_codec_sample.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "codec/codec_loops.hpp"

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

}  // namespace kvo
