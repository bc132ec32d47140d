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

// Bytes that were received and not yet used: those of `room` from `first` to `last`.
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

// Reads answers that are such values, one for each slot, in order. Writes the heads one after the other to `heads`, the
// records to their slots, and the digest of each record's bytes to `digests`. Returns how many values came: it stops
// before the first answer that is anything else, and reads nothing of that answer. If an answer is too long or ends too
// early, the contents of its slot are undefined.
//
// The socket waits; `each` is the time for one value. Code::unavailable: one was late. Code::failed: the other side has
// hung up or sends nonsense. The inbox holds at least a head and 64 bytes.
Result<std::size_t> receive_values(int socket, RespInbox& inbox, const RespValues& values,
                                   std::span<std::uint8_t> heads, std::span<RunDigest> digests,
                                   std::chrono::milliseconds each);

}  // namespace kvo
