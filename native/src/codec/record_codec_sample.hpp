// Decides from samples of a record how to code it, and whether that is worth while.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "codec/codec_paths.hpp"

namespace kvo {

struct CodePlan {
    UnitKind kind = UnitKind::word;
    std::size_t columns = 0;  // a multiple of 32 up to 1024; 0: no columns are alike
};

// Returns how to code the record, or nothing if coding is not expected to make it at least 5% shorter.
std::optional<CodePlan> plan_code(std::span<const std::uint8_t> record);

}  // namespace kvo
