#include "index/index_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <string>
#include <utility>

#include "base/status.hpp"
#include "shim/shared_mapping.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t kSmallStep = std::uint64_t{64} << 10;

// Regions of this size or more get whole huge pages. Smaller ones would waste memory; larger ones need them for fast
// look-ups.
constexpr std::uint64_t kHugeFrom = 4 * kHugePageBytes;

// Marks of segments lie behind the signs of sessions, of which there are fewer.
constexpr std::uint64_t kPinnedFrom = std::uint64_t{1} << 32;

struct flock byte_at(std::uint64_t place, short type) {
    struct flock record{};
    record.l_type = type;
    record.l_whence = SEEK_SET;
    record.l_start = static_cast<off_t>(place);
    record.l_len = 1;
    return record;
}

}  // namespace

Result<IndexFile> IndexFile::create(const IndexBounds& bounds, std::uint64_t seed) {
    const std::uint64_t file_bytes = plan_regions(bounds.entry_limit).file_bytes;
    SegmentWish wish;
    wish.name = "kvoffload-index";
    wish.size_bytes = file_bytes;
    auto segment = Segment::create(wish);
    if (!segment.ok()) {
        return segment.fault();
    }
    if (Status status = segment.value().commit_range(0, plan_regions(bounds.entry_limit).tenants.end()); !status.ok()) {
        return status;
    }
    format_index(segment.value().writable_bytes().data(), bounds, seed);
    return open(std::move(segment.value()));
}

Result<IndexFile> IndexFile::adopt(FileDescriptor file) {
    struct stat facts;
    if (fstat(file.number(), &facts) != 0) {
        return Status(Code::invalid, "the index file cannot be looked at");
    }
    auto segment =
        Segment::adopt(std::move(file), {.size_bytes = static_cast<std::uint64_t>(facts.st_size), .is_own = true});
    if (!segment.ok()) {
        return segment.fault();
    }
    auto index = open(std::move(segment.value()));
    if (!index.ok()) {
        return index;
    }
    if (Status status = index.value().ensure_used(); !status.ok()) {
        return status;
    }
    return index;
}

Result<IndexFile> IndexFile::open(Segment segment) {
    const auto view = view_index(segment.writable_bytes());
    if (!view.ok()) {
        return view.fault();
    }
    auto read_only = segment.open_read_only();
    if (!read_only.ok()) {
        return read_only.fault();
    }
    return IndexFile(std::move(segment), std::move(read_only.value()), view.value());
}

IndexFile::IndexFile(Segment segment, FileDescriptor read_only, const IndexView& view)
    : segment_(std::move(segment)), read_only_(std::move(read_only)), view_(view) {
    const IndexRegions& regions = view_.regions;
    const std::array<const Region*, 8> all = {&regions.buckets,  &regions.overflow,      &regions.entries,
                                              &regions.digests,  &regions.shard_digests, &regions.namespaces,
                                              &regions.sessions, &regions.lease_nodes};
    for (std::size_t i = 0; i < all.size(); ++i) {
        marks_[i].offset = all[i]->offset;
    }
}

IndexFile::IndexFile(IndexFile&& other) noexcept
    : segment_(std::move(other.segment_)), read_only_(std::move(other.read_only_)), view_(other.view_) {
    for (std::size_t i = 0; i < marks_.size(); ++i) {
        marks_[i].offset = other.marks_[i].offset;
        marks_[i].committed_bytes.store(other.marks_[i].committed_bytes.load());
    }
}

Result<FileDescriptor> IndexFile::open_signed(std::uint32_t place) const {
    auto file = segment_.open_read_only();
    if (!file.ok()) {
        return file;
    }
    struct flock sign = byte_at(place, F_RDLCK);
    if (fcntl(file.value().number(), F_OFD_SETLK, &sign) != 0) {
        return system_fault("fcntl(F_OFD_SETLK)", errno);
    }
    return file;
}

bool IndexFile::has_sign(std::uint32_t place) const noexcept {
    struct flock sign = byte_at(place, F_WRLCK);
    return fcntl(segment_.file(), F_OFD_GETLK, &sign) != 0 || sign.l_type != F_UNLCK;
}

bool IndexFile::is_pinned(std::uint32_t segment) const noexcept {
    struct flock mark = byte_at(kPinnedFrom + segment, F_WRLCK);
    return fcntl(segment_.file(), F_OFD_GETLK, &mark) != 0 || mark.l_type != F_UNLCK;
}

Status mark_pinned(int index_file, std::uint32_t segment, bool is_pinned) {
    struct flock mark = byte_at(kPinnedFrom + segment, is_pinned ? F_RDLCK : F_UNLCK);
    return fcntl(index_file, F_OFD_SETLK, &mark) == 0 ? Status() : system_fault("fcntl(F_OFD_SETLK)", errno);
}

Status IndexFile::ensure(const Region& region, std::uint64_t item_count) {
    const auto mark = std::ranges::find(marks_, region.offset, &Mark::offset);
    assert(mark != marks_.end());
    const std::uint64_t needed = item_count * region.item_bytes;
    const std::uint64_t committed = mark->committed_bytes.load(std::memory_order_relaxed);
    if (needed <= committed) {
        return {};
    }
    const std::uint64_t region_bytes = region.end() - region.offset;
    if (needed > region_bytes) {
        return {Code::failed, "the index is full: a region made for " + std::to_string(region.item_limit) + " items"};
    }
    // A quarter ahead at first, then up to the end of a huge page: few calls, and never much memory that is not used.
    std::uint64_t wanted = needed + std::max(committed / 4, kSmallStep);
    if (wanted >= kHugeFrom) {
        wanted = (region.offset + needed + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes - region.offset;
    }
    wanted = std::min(wanted, region_bytes);
    // A region that had small pages until now gets huge pages for all of it.
    const std::uint64_t begin = committed < kHugeFrom && wanted >= kHugeFrom ? 0 : committed;
    if (Status status = segment_.commit_range(region.offset + begin, wanted - begin); !status.ok()) {
        return status;
    }
    mark->committed_bytes.store(wanted, std::memory_order_relaxed);
    return {};
}

// Pages that a dead process was given are there already; this only makes sure of it.
Status IndexFile::ensure_used() {
    const IndexHeader& header = *view_.header;
    const IndexRegions& regions = view_.regions;
    const std::array<std::pair<const Region*, std::uint64_t>, 6> used = {{
        {&regions.buckets, header.bucket_count.load()},
        {&regions.entries, header.entry_count.load()},
        {&regions.digests, header.entry_count.load()},
        {&regions.sessions, header.session_count.load()},
        {&regions.lease_nodes, header.lease_node_count.load()},
        {&regions.namespaces, header.namespace_count.load()},
    }};
    for (const auto& [region, count] : used) {
        if (Status status = ensure(*region, std::min(count, region->item_limit)); !status.ok()) {
            return status;
        }
    }
    return {};
}

}  // namespace kvo
