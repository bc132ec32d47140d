// Values of RESP, the language of Valkey and Redis, from a connected socket to memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.hpp"
#include "digest/digest.hpp"
#include "link/record_link.hpp"

namespace kvo {

// What was received and nobody has taken yet: the bytes of `room` from `first` to `last`.
struct RespInbox {
    std::span<std::uint8_t> room;
    std::size_t first = 0;
    std::size_t last = 0;
};

// Each value is a head of so many bytes and a record.
struct RespValues {
    std::size_t head_bytes = 0;
    LinkRecords records;
};

// Reads answers that are such values, one a slot and in order: the heads side by side to `heads`, the records to their
// slots, what each one's bytes sum to to `digests`. Returns how many came: it ends before the first answer that is
// anything else, of which nothing is taken. Of the slot of an answer that is longer than it should be, or that ends
// before its time, nothing is promised.
//
// The socket waits; `each` is the time for one value. Code::unavailable: one was late. Code::failed: the other side has
// hung up or sends nonsense. The inbox holds at least a head and 64 bytes.
Result<std::size_t> receive_values(int socket, RespInbox& inbox, const RespValues& values,
                                   std::span<std::uint8_t> heads, std::span<RunDigest> digests,
                                   std::chrono::milliseconds each);

}  // namespace kvo
