// A cache's segments as another process of it sees them: mapped, and addressed as the cache counts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "arena/segment.hpp"
#include "base/status.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// Immutable, so safe to call from any thread. A forked child does not have the memory.
class SegmentMap {
public:
    // Maps all of them for reading and writing. Takes the descriptors in any case. Code::invalid: one is no segment of
    // this size.
    static Result<std::unique_ptr<SegmentMap>> open(std::vector<FileDescriptor> files, std::uint64_t segment_bytes);

    std::uint64_t size_bytes() const noexcept { return segments_.size() * segment_bytes_; }

    // Where each segment begins in this process.
    std::vector<std::uint64_t> bases() const;

    // Where the slot at this address of the cache lies in this process. A record is never in two segments.
    // Code::invalid: there are no such bytes.
    Result<std::span<std::byte>> find(std::uint64_t address, std::uint64_t length) const;

private:
    SegmentMap(std::vector<Segment> segments, std::uint64_t segment_bytes);

    std::vector<Segment> segments_;
    std::vector<std::span<std::byte>> records_;  // of each segment all its bytes
    std::uint64_t segment_bytes_;
};

}  // namespace kvo
