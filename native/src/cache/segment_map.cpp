#include "cache/segment_map.hpp"

#include <string>
#include <utility>

namespace kvo {

Result<std::unique_ptr<SegmentMap>> SegmentMap::open(std::vector<FileDescriptor> files, std::uint64_t segment_bytes) {
    std::vector<Segment> segments;
    segments.reserve(files.size());
    for (FileDescriptor& file : files) {
        Result<Segment> segment = Segment::adopt(std::move(file), {.size_bytes = segment_bytes});
        if (!segment.ok()) {
            return Status(Code::invalid,
                          "segment " + std::to_string(segments.size()) + ": " + segment.fault().message());
        }
        segments.push_back(std::move(segment.value()));
    }
    return std::unique_ptr<SegmentMap>(new SegmentMap(std::move(segments), segment_bytes));
}

SegmentMap::SegmentMap(std::vector<Segment> segments, std::uint64_t segment_bytes)
    : segments_(std::move(segments)), segment_bytes_(segment_bytes) {
    records_.reserve(segments_.size());
    for (Segment& segment : segments_) {
        records_.push_back(segment.writable_bytes());
    }
}

std::vector<std::uint64_t> SegmentMap::bases() const {
    std::vector<std::uint64_t> bases;
    bases.reserve(segments_.size());
    for (const Segment& segment : segments_) {
        bases.push_back(reinterpret_cast<std::uint64_t>(segment.bytes().data()));
    }
    return bases;
}

Result<std::span<std::byte>> SegmentMap::find(std::uint64_t address, std::uint64_t length) const {
    const std::uint64_t index = segment_bytes_ == 0 ? 0 : address / segment_bytes_;
    const std::uint64_t offset = segment_bytes_ == 0 ? 0 : address % segment_bytes_;
    if (index >= segments_.size() || length > segment_bytes_ - offset) {
        return Status(Code::invalid,
                      "no segment has " + std::to_string(length) + " bytes at " + std::to_string(address));
    }
    return records_[index].subspan(offset, length);
}

}  // namespace kvo
