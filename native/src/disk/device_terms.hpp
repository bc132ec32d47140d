// The settings of a device of the disk tier, and its counters.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/status.hpp"
#include "disk/coding_choice.hpp"
#include "disk/record_format.hpp"
#include "io/io_queue.hpp"

namespace kvo {

inline constexpr std::uint64_t kCodedBytesAStep = std::uint64_t{4} << 20;  // then reads are looked after

// Of fewer segments none is evicted, because two must be empty before another is begun.
inline constexpr std::uint64_t kLeastSegments = 4;

struct DeviceTerms {
    std::string path;                  // a folder that is there; `may_create`: an empty one becomes a store
    std::uint64_t capacity_bytes = 0;  // of all segments together; the rest of a segment is left
    std::uint64_t segment_bytes = std::uint64_t{128} << 20;
    std::uint64_t daily_bytes = 0;  // 0: no bound
    bool may_create = true;
    DiskCoding coding = DiskCoding::off;
    // Null: records are not sealed. Otherwise all are, and others are not read, since anyone who may write to the
    // folder could have put them there.
    std::shared_ptr<const SealKeys> seal_keys = nullptr;

    std::string io_engine = "auto";
    std::size_t io_depth = 64;
    std::size_t write_depth = 8;                                    // of these
    std::size_t write_buffer_bytes = std::size_t{1} << 20;          // records are packed into these
    std::size_t read_piece_bytes = (std::size_t{1} << 20) + 16384;  // no read is longer
    std::size_t read_buffers = 32;
    std::uint64_t gap_bytes = std::uint64_t{64} << 10;
    std::uint64_t record_limit_bytes = std::uint64_t{32} << 20;

    std::chrono::milliseconds linger{2};  // a record waits so long for others to be written with it
    std::chrono::milliseconds sync_interval{1000};
    std::uint64_t sync_bytes = std::uint64_t{64} << 20;
    std::chrono::milliseconds io_timeout{10000};
    std::chrono::milliseconds probe_interval{2000};
    double move_share = 0.12;  // of the bytes put, what may be written again to keep it

    // Tests put engines of their own here, and a clock.
    std::function<Result<std::unique_ptr<IoEngine>>()> make_engine = {};
    std::function<Instant()> now = [] { return std::chrono::steady_clock::now(); };
};

// Code::invalid, in one line, if they cannot be kept.
Status check_terms(const DeviceTerms& terms);

// The most bytes that a record of this length has where it is stored.
inline std::uint64_t most_stored(const DeviceTerms& terms, std::uint64_t length) {
    return length + (terms.seal_keys ? kSealOverheadBytes : 0);
}

enum class DeviceState : std::uint8_t {
    opening,
    ready,
    read_only,  // nothing is written until a probe succeeds
    absent,     // nothing can be read or written until the folder is back
};

struct DeviceCounts {
    std::uint64_t put_records = 0;
    std::uint64_t put_bytes = 0;           // of records, without headers
    std::uint64_t written_bytes = 0;       // all that went to the device
    std::uint64_t coded_records = 0;       // of records that were put or moved, those that became shorter
    std::uint64_t coded_bytes = 0;         // of these, before
    std::uint64_t coded_stored_bytes = 0;  // and after
    std::uint64_t moved_bytes = 0;         // of records that were written again when their segment was evicted
    std::uint64_t found_records = 0;
    std::uint64_t found_bytes = 0;
    std::uint64_t read_bytes = 0;  // all that came from the device
    std::uint64_t damaged_records = 0;
    std::uint64_t unreadable_records = 0;  // while others could be read
    std::uint64_t over_budget_records = 0;
    std::uint64_t evicted_segments = 0;
    std::uint64_t evicted_records = 0;
    std::uint64_t io_errors = 0;
    std::uint64_t syncs = 0;
    std::uint64_t dropped_segments = 0;  // at recovery: neither footer nor records of this store
    std::uint64_t recovered_records = 0;
    std::uint64_t recovered_segments = 0;
    std::uint64_t scanned_segments = 0;  // of these, without a footer
    std::uint64_t recovery_us = 0;
};

struct DeviceHealth {
    DeviceState state = DeviceState::opening;
    std::string reason;  // one line; of a device that is ready only if its file system is full
    std::string io_engine;
    std::uint64_t capacity_bytes = 0;
    std::uint64_t segments = 0;  // that have files
    std::uint64_t records = 0;
    std::uint64_t live_bytes = 0;
    std::uint64_t index_bytes = 0;
    DeviceCounts counts;
};

}  // namespace kvo
