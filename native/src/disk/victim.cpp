#include "disk/victim.hpp"

#include <algorithm>
#include <tuple>

namespace kvo {
namespace {

constexpr std::uint64_t kHotWeight = 4;

}  // namespace

std::optional<Candidate> choose_victim(std::span<Candidate> candidates) {
    if (candidates.empty()) {
        return std::nullopt;
    }
    std::ranges::sort(candidates, {}, &Candidate::generation);
    const auto older = candidates.first((candidates.size() + 1) / 2);
    const std::uint64_t newest = candidates.back().generation;
    return *std::ranges::min_element(older, {}, [newest](const Candidate& one) {
        const auto worth = static_cast<double>(one.live_bytes + (kHotWeight - 1) * one.hot_bytes);
        return std::tuple(worth / static_cast<double>(newest - one.generation + 1), one.generation);
    });
}

void MoveAllowance::add_put(std::uint64_t bytes) {
    left_ = std::min(limit_, left_ + share_ * static_cast<double>(bytes));
}

bool MoveAllowance::take(std::uint64_t bytes) {
    if (static_cast<double>(bytes) > left_) {
        return false;
    }
    left_ -= static_cast<double>(bytes);
    return true;
}

}  // namespace kvo
