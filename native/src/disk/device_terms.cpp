#include "disk/device_terms.hpp"

#include <string>

namespace kvo {

Status check_terms(const DeviceTerms& terms) {
    const auto refuse = [&terms](const std::string& why) { return Status(Code::invalid, terms.path + ": " + why); };
    if (terms.path.empty()) {
        return refuse("a device has a folder");
    }
    if (terms.segment_bytes % kIoAlignment != 0 || terms.segment_bytes < 16 * kIoAlignment ||
        terms.segment_bytes > std::uint64_t{64} << 30) {
        return refuse("segment_bytes is a multiple of 4096 from 64 KiB to 64 GiB, not " +
                      std::to_string(terms.segment_bytes));
    }
    if (terms.capacity_bytes / terms.segment_bytes < kLeastSegments) {
        return refuse("capacity_bytes must have room for " + std::to_string(kLeastSegments) + " segments of " +
                      std::to_string(terms.segment_bytes) + " bytes, and is " + std::to_string(terms.capacity_bytes));
    }
    if (terms.capacity_bytes / terms.segment_bytes > 1U << 20) {
        return refuse("capacity_bytes must not have room for more than 1048576 segments; make them larger");
    }
    if (terms.write_buffer_bytes % kIoAlignment != 0 || terms.write_buffer_bytes < 2 * kIoAlignment ||
        terms.read_piece_bytes % kIoAlignment != 0 || terms.read_piece_bytes < 2 * kIoAlignment) {
        return refuse("write_buffer_bytes and read_piece_bytes are multiples of 4096 from 8192 on");
    }
    if (terms.record_limit_bytes == 0 || terms.record_limit_bytes > kMaxDiskRecordBytes) {
        return refuse("record_limit_bytes is 1 to 2147483648");
    }
    if (terms.io_depth < 2 || terms.write_depth == 0 || terms.write_depth >= terms.io_depth ||
        terms.read_buffers == 0) {
        return refuse("io_depth must leave room for a read beside write_depth, and there must be a buffer to read to");
    }
    if (!(terms.move_share >= 0.0 && terms.move_share <= 1.0)) {
        return refuse("move_share is 0 to 1");
    }
    return {};
}

}  // namespace kvo
