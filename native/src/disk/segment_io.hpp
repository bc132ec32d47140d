// Reads and writes of whole segments that the device's thread waits for.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "disk/device_terms.hpp"
#include "disk/io_runner.hpp"
#include "disk/recovery.hpp"
#include "disk/segment_files.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {

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

}  // namespace kvo
