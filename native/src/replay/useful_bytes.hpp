// Finds the resident bytes that some acquire could use: those that any boundary needs which all groups accept.
#pragma once

#include <cstdint>
#include <functional>

#include "replay/replay.hpp"
#include "replay/replay_trace.hpp"

namespace kvo {

// `holds` says whether a group's record of a block is resident. Boundaries are multiples of `boundary_blocks`.
std::uint64_t useful_bytes(const ReplayTrace& trace, const ReplayShape& shape, std::uint32_t boundary_blocks,
                           const std::function<bool(std::uint32_t, BlockNumber)>& holds);

}  // namespace kvo
