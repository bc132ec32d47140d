// The prefix policy's facts about one entry, in 24 bytes.
#pragma once

#include <cstdint>

#include "base/entry_number.hpp"
#include "evict/entry_lists.hpp"
#include "evict/eviction_policy.hpp"
#include "evict/prefix_classes.hpp"

namespace kvo {

// | field          | a block of a prefix with children | without | a window block or state |
// |----------------|-----------------------------------|---------|-------------------------|
// | `older`        | how many entries hang on it       | link    | link                    |
// | `newer`        | first window block or state of it | link    | link                    |
// | `extra`        | with states: how many need its    | same    | next one of its block   |
// |                | window; else: home of its ghost   |         |                         |
struct PrefixNode {
    static constexpr std::uint16_t kNotKnown = 3;  // no Reuse

    EntryNumber parent = kNoEntry;
    std::uint32_t name = 0;
    EntryNumber older = 0;  // links hold the number of a list, too: where it ends
    EntryNumber newer = kNoEntry;
    std::uint32_t extra = 0;
    std::uint16_t epoch = 0;  // of its last use
    std::uint16_t kind : 5 = kNoClass;
    std::uint16_t reuse : 2 = kNotKnown;
    std::uint16_t needs_state : 1 = 0;
    std::uint16_t is_in_tier : 1 = 0;  // a tier below memory has it, too
    std::uint16_t is_queued : 1 = 0;
    // A child belongs to its parent only if these agree: a number is used again while children of the old entry live.
    std::uint16_t parity : 1 = 0;
    std::uint16_t parent_parity : 1 = 0;
    // Of a window block in no queue, where no states are: the one behind it needs it. In a queue: it is there whatever
    // its class says, as it is kept or of no use.
    std::uint16_t is_held : 1 = 0;
    std::uint16_t mark : 3 = 0;  // its group's low bits; of a state: which window length it counted with

    bool is_known() const noexcept { return reuse != kNotKnown; }
    bool is(Reuse other) const noexcept { return reuse == static_cast<std::uint16_t>(other); }
    bool is_held_back() const noexcept { return is_held != 0 && is_queued == 0; }
    EntryClass entry_class() const noexcept { return static_cast<EntryClass>(kind); }
};
static_assert(sizeof(PrefixNode) == 24, "what eviction_policy.hpp allows an entry");

using PrefixNodes = ChunkedArray<PrefixNode>;

}  // namespace kvo
