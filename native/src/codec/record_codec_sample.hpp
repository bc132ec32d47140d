// What a few places of a record say of the whole: how it is to be coded, and whether that is worth while.
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

// None: it is not to become shorter by 5%.
std::optional<CodePlan> plan_code(std::span<const std::uint8_t> record);

}  // namespace kvo
