// Codes records on their way to a segment.
#pragma once

#include <cstdint>
#include <span>

#include "codec/record_codec.hpp"
#include "disk/coding_choice.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"

namespace kvo {

// For the device's thread.
class RecordCoder {
public:
    // All outlive it.
    RecordCoder(const DeviceTerms& terms, CodingChoice& choice, DeviceCounts& counts)
        : terms_(terms), choice_(choice), counts_(counts) {}

    // Returns the coded form of the item's record, valid until the next call, or nothing if it is written plain.
    std::span<const std::uint8_t> code(const DiskItem& item);

    // Coding takes time, and reads go first, so each step codes a limited number of bytes.
    void begin_step() { tried_bytes_ = 0; }
    bool has_coded_enough() const noexcept { return tried_bytes_ >= kCodedBytesAStep; }

private:
    const DeviceTerms& terms_;
    CodingChoice& choice_;
    DeviceCounts& counts_;
    RecordEncoder encoder_;
    std::uint64_t tried_bytes_ = 0;
};

}  // namespace kvo
