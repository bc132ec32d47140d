#include "replay/replay_trace.hpp"

#include <limits>

namespace kvo {

std::size_t ReplayTrace::KeyHash::operator()(const Key& key) const noexcept {
    return spread_bits(spread_bits(key.id) ^ key.parent);
}

Status ReplayTrace::add(std::span<const std::uint64_t> ids) {
    if (ids.size() > std::numeric_limits<std::uint32_t>::max() - references_.size()) {
        return {Code::invalid, "a trace may have 2**32 - 1 block references, this one has more"};
    }
    if (ids.empty()) {
        return {};
    }
    BlockNumber previous = kNoBlock;
    std::uint32_t depth = 0;
    for (const std::uint64_t id : ids) {
        depth += 1;
        const auto [found, is_new] = numbers_.try_emplace({id, previous}, static_cast<BlockNumber>(parents_.size()));
        if (is_new) {
            parents_.push_back(previous);
            depths_.push_back(depth);
        }
        previous = found->second;
        references_.push_back(previous);
    }
    reference_squares_ += std::uint64_t{ids.size()} * ids.size();
    ends_.push_back(static_cast<std::uint32_t>(references_.size()));
    return {};
}

std::span<const BlockNumber> ReplayTrace::request(std::size_t at) const noexcept {
    const std::size_t begin = at == 0 ? 0 : ends_[at - 1];
    return std::span(references_).subspan(begin, ends_[at] - begin);
}

}  // namespace kvo
