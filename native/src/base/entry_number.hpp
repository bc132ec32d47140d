// Position of an entry in its index. Numbers of removed entries are used again.
#pragma once

#include <cstdint>

namespace kvo {

using EntryNumber = std::uint32_t;
constexpr EntryNumber kNoEntry = 0xffffffff;

}  // namespace kvo
