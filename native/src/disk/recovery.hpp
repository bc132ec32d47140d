// Finds the records of a segment file, however the process that wrote it ended.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "disk/device_terms.hpp"
#include "disk/io_runner.hpp"
#include "disk/record_format.hpp"
#include "disk/segment_files.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {

// Reads exactly these bytes, which are aligned; false: they cannot be had.
using ReadExactly = std::function<bool(std::uint64_t offset, std::span<std::byte> target)>;

struct FoundSegment {
    SegmentLife life;
    bool has_footer = false;
    bool is_whole = true;              // all of it could be read; the caller knows
    std::vector<FooterEntry> entries;  // ascending
};

// Reads the footer if it is whole; otherwise goes through the records and verifies each. Returns nothing if the file is
// not a segment of this store. Records that a footer lists are verified when they are read. Records that cannot be read
// are left out, and after 16 failed reads so is the rest of the file. `keys`: verify sealed records; null if there are
// none.
std::optional<FoundSegment> find_segment(const ReadExactly& read, std::uint64_t store, std::uint64_t segment_bytes,
                                         std::uint64_t record_limit_bytes, const SealKeys* keys = nullptr);

// The footer's entries, if it is whole and of this life.
std::optional<std::vector<FooterEntry>> find_footer(const ReadExactly& read, const SegmentLife& life,
                                                    std::uint64_t segment_bytes);

// Reads and writes of whole segments that the device's thread waits for.
//
// For the device's thread. No call takes longer than the timeout of all I/O for each read or write.
class SegmentIo {
public:
    // All outlive it.
    SegmentIo(const DeviceTerms& terms, IoRunner& runner, SegmentFiles& files, DeviceCounts& counts)
        : terms_(terms), runner_(runner), files_(files), counts_(counts) {}

    // Finds the records in the segment's file. `error` is the first error, or 0. A device that does not answer is asked
    // only once.
    std::optional<FoundSegment> find(std::uint32_t number, int& error);

    // The footer's entries, if it can be read and is of the segment's life.
    std::optional<std::vector<FooterEntry>> find_entries(std::uint32_t number);

    // Writes the footer of a segment whose writer ended without one. The writer kept the room for it free.
    bool write_footer(std::uint32_t number, const FoundSegment& found);

private:
    int read(int file, std::uint64_t offset, std::span<std::byte> target);
    int run(IoKind kind, int file, std::uint64_t offset, const std::shared_ptr<AlignedMemory>& memory);

    const DeviceTerms& terms_;
    IoRunner& runner_;
    SegmentFiles& files_;
    DeviceCounts& counts_;
};

// Reads a device's folder when it is opened, and fills the segment table and the index from it.
//
// For the device's thread, once for each time that the folder is opened.
class DeviceRecovery {
public:
    // All outlive it.
    DeviceRecovery(const DeviceTerms& terms, SegmentFiles& files, SegmentIo io, SharedIndex& index,
                   DeviceCounts& counts)
        : terms_(terms), files_(files), io_(io), index_(index), counts_(counts) {}

    // A fault: the folder cannot be used, or so much of it cannot be read that the device has gone.
    Status run();

private:
    void adopt(std::uint32_t number, FoundSegment found);

    const DeviceTerms& terms_;
    SegmentFiles& files_;
    SegmentIo io_;
    SharedIndex& index_;
    DeviceCounts& counts_;
};

}  // namespace kvo
