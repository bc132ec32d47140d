#include "replay/useful_bytes.hpp"

#include <algorithm>
#include <vector>

namespace kvo {
namespace {

using Holds = std::function<bool(std::uint32_t, BlockNumber)>;
using Marks = std::vector<std::vector<bool>>;  // by group and block

// Blocks that a boundary at `block` needs of a group that is not a prefix; false: `visit` refused one.
template <typename Visit>
bool each_needed(const ReplayTrace& trace, const ReplayGroup& group, BlockNumber block, Visit visit) {
    std::uint32_t blocks = group.reuse == Reuse::window ? group.window_blocks : 1;
    for (; blocks > 0 && block != kNoBlock; --blocks, block = trace.parent(block)) {
        if (!visit(block)) {
            return false;
        }
    }
    return true;
}

// The boundary at `block` is reached by all prefix groups; if the others accept it too, marks what they need.
bool mark_boundary(const ReplayTrace& trace, const ReplayShape& shape, BlockNumber block, const Holds& holds,
                   Marks& useful) {
    for (const bool is_marking : {false, true}) {
        for (std::uint32_t group = 0; group < shape.size(); ++group) {
            if (shape[group].reuse == Reuse::prefix) {
                continue;
            }
            const bool accepts = each_needed(trace, shape[group], block, [&](BlockNumber needed) {
                if (is_marking) {
                    useful[group][needed] = true;
                }
                return holds(group, needed);
            });
            if (!accepts) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace

std::uint64_t useful_bytes(const ReplayTrace& trace, const ReplayShape& shape, std::uint32_t boundary_blocks,
                           const Holds& holds) {
    const auto block_count = static_cast<BlockNumber>(trace.block_count());
    Marks useful(shape.size(), std::vector<bool>(block_count));
    // Parents have the lower numbers: one way through the blocks finds what is reached, the way back what is needed.
    std::vector<bool> is_reached(block_count);
    std::vector<bool> is_needed(block_count);
    for (BlockNumber block = 0; block < block_count; ++block) {
        const BlockNumber parent = trace.parent(block);
        bool reaches = parent == kNoBlock || is_reached[parent];
        for (std::uint32_t group = 0; group < shape.size() && reaches; ++group) {
            reaches = shape[group].reuse != Reuse::prefix || holds(group, block);
        }
        is_reached[block] = reaches;
        is_needed[block] =
            reaches && trace.depth(block) % boundary_blocks == 0 && mark_boundary(trace, shape, block, holds, useful);
    }
    std::uint64_t bytes = 0;
    for (BlockNumber block = block_count; block-- > 0;) {
        if (is_needed[block] && trace.parent(block) != kNoBlock) {
            is_needed[trace.parent(block)] = true;
        }
        for (std::uint32_t group = 0; group < shape.size(); ++group) {
            const bool counts = shape[group].reuse == Reuse::prefix ? is_needed[block] : useful[group][block];
            bytes += counts ? shape[group].size_bytes : 0;
        }
    }
    return bytes;
}

}  // namespace kvo
