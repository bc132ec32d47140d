// Reads a device's folder when it is opened, and fills the segment table and the index from it.
#pragma once

#include <cstdint>

#include "base/status.hpp"
#include "disk/device_terms.hpp"
#include "disk/recovery.hpp"
#include "disk/segment_files.hpp"
#include "disk/segment_io.hpp"

namespace kvo {

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
