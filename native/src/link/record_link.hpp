// Bytes over one connected socket, between memory and memory: as they are, or sealed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "codec/background_codec.hpp"
#include "digest/digest.hpp"
#include "link/sealing.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

struct LinkKeys {
    SealKey send;
    SealKey receive;
};

// Records of one size, at these addresses, of one identity, group and shard.
struct LinkRecords {
    std::span<const std::uint64_t> slots;
    std::uint64_t record_bytes = 0;
};

// The record that was received into one slot. If it was coded and could not be decoded, `is_whole` is false and the
// slot's bytes are meaningless.
struct CameRecord {
    RunDigest digest;
    bool is_whole = true;
};

// Counts of the coded records that one call received: their number, their coded bytes, and how long decoding them took.
struct CameCoded {
    std::uint64_t records = 0;
    std::uint64_t coded_bytes = 0;
    std::chrono::nanoseconds decoding{};
};

// For one thread at a time, except `shut`. After a failed call the link cannot be used any more.
//
// A sealed link carries pieces: four bytes with the length, so many bytes, and their tag. Each call's data is cut into
// pieces of its own, the first of which is the head.
class RecordLink {
public:
    using Clock = std::chrono::steady_clock;
    using Instant = Clock::time_point;

    static constexpr std::size_t kPieceBytes = 128 << 10;

    // Takes the socket. Code::unavailable: it cannot be sealed here.
    static Result<RecordLink> make(FileDescriptor socket, const std::optional<LinkKeys>& keys);

    // Sends `head`, and then the records. Code::unavailable: the other side did not take all of it in time.
    Status send(std::span<const std::uint8_t> head, const LinkRecords& records, Instant deadline);

    // Receives exactly `out.size()` bytes. Code::unavailable: they did not all come in time.
    Status receive(std::span<std::uint8_t> out, Instant deadline);

    // Receives records into their slots, and the digest of each one's bytes into `digests`.
    Status receive_records(const LinkRecords& records, std::span<RunDigest> digests, Instant deadline);

    // The same for records that may be coded: four bytes before each record give its coded length, or 0 if it is not
    // coded. A thread of low priority decodes them. Code::failed: a length is too large for a coded record.
    Result<CameCoded> receive_coded_records(const LinkRecords& records, std::span<CameRecord> came, Instant deadline);

    // Ends the call that is waiting, which fails at once. Any thread may call it.
    void shut() noexcept;

private:
    RecordLink(FileDescriptor socket, std::optional<Sealing> seal, std::optional<Sealing> open);

    Status send_plain(std::span<const std::uint8_t> head, const LinkRecords& records, Instant deadline);
    Status send_sealed(std::span<const std::uint8_t> head, const LinkRecords& records, Instant deadline);
    Status send_piece(std::size_t size, Instant deadline);
    Status write_all(std::span<const std::uint8_t> bytes, Instant deadline);
    Status read_all(std::span<std::uint8_t> out, Instant deadline);
    Result<RunDigest> receive_record(std::span<std::uint8_t> slot, Instant deadline);
    Status receive_sealed(std::span<std::uint8_t> out, Instant deadline);
    Status open_piece(std::span<std::uint8_t>& out, Instant deadline);
    Status wait(short events, Instant deadline);

    FileDescriptor socket_;
    std::optional<Sealing> seal_;
    std::optional<Sealing> open_;
    std::vector<std::uint8_t> sealed_;  // a piece on its way out
    std::vector<std::uint8_t> coming_;  // a piece on its way in, as it came
    std::vector<std::uint8_t> opened_;  // bytes of a piece that no call has asked for yet
    std::size_t opened_from_ = 0;
    std::unique_ptr<BackgroundCodec> codec_;  // begins with the first record that is coded
};

}  // namespace kvo
