// A thread's piece of a plan: its runs, one after the other, with the next ones asked for in time.
#pragma once

#include <cstdint>
#include <functional>

#include "copy/copy_plan.hpp"
#include "copy/run_list.hpp"
#include "digest/digest.hpp"

namespace kvo {

// Called with an item of the plan and the digest of what this piece has of its record, once for each such record.
using TakeDigest = std::function<void(std::uint32_t item, const RunDigest& digest)>;

// Copies the bytes [begin, end) of the row; others see them when this returns. Throws only what `take_digest` throws,
// which is not called for plans without digests.
void copy_piece(const CopyPlan& plan, const RunList& runs, std::uint64_t begin, std::uint64_t end,
                const TakeDigest& take_digest);

}  // namespace kvo
