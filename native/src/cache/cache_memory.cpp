#include "cache/cache_memory.hpp"

#include <sys/random.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.hpp"
#include "shim/memory_headroom.hpp"

namespace kvo {
namespace {

Result<std::uint64_t> random_number() {
    std::uint64_t number = 0;
    if (getrandom(&number, sizeof(number), 0) != static_cast<ssize_t>(sizeof(number))) {
        return system_fault("the kernel gives no random number", errno);
    }
    return number;
}

// Refuses at once a pool that does not fit into the machine even if other processes give back all they have now.
Status check_total(const CacheOptions& options, std::uint64_t pool_bytes) {
    const std::uint64_t total = read_memory_headroom(options.populate.proc).total_bytes;
    const std::uint64_t wanted = pool_bytes + std::min(options.populate.keep_free_bytes, UINT64_MAX - pool_bytes);
    if (options.is_sparse || wanted <= total) {
        return {};
    }
    return {Code::unavailable,
            describe_size(wanted) + " of memory are not there: " + describe_size(total) + " is all there is"};
}

constexpr std::uint64_t mix(std::uint64_t mark, std::uint64_t word) {
    mark = (mark ^ word) * 0x9e3779b97f4a7c15;
    return mark ^ mark >> 32;
}

// Returns a mark that tells the files of one pool, in their order, from other files and from the same ones reordered.
Result<std::uint64_t> mark_segments(const std::vector<Segment>& segments) {
    std::uint64_t mark = segments.size();
    for (const Segment& segment : segments) {
        const auto file = mark_file(segment.file());
        if (!file.ok()) {
            return file;
        }
        mark = mix(mark, file.value());
    }
    return mark;
}

// Checks that the memory is of the same domain, and that every user who had it may have it now.
Status check_former_owner(const IndexHeader& header, const CacheOptions& options) {
    const auto name_end = std::ranges::find(header.domain, '\0');
    if (std::string_view(header.domain.begin(), name_end) != options.owner.domain) {
        return {Code::invalid, "the memory is another domain's"};
    }
    if (options.former_boot_id != 0 && header.boot_id.load() != options.former_boot_id) {
        return {Code::invalid, "the memory is of another server than was said"};
    }
    const auto& admitted = options.owner.users;
    const std::uint32_t count = header.user_count.load();
    if (!admitted) {
        return {};
    }
    if (count > kUserLimit) {
        return {Code::invalid, "more than " + std::to_string(kUserLimit) + " users had the memory"};
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        if (const std::uint32_t uid = header.users[i].load(); std::ranges::find(*admitted, uid) == admitted->end()) {
            return {Code::invalid, "user " + std::to_string(uid) + " had the memory, and may not use the domain"};
        }
    }
    return {};
}

}  // namespace

CacheMemory::CacheMemory(FileLock lock, IndexFile index, std::vector<Segment> segments)
    : lock_(std::move(lock)), index_(std::move(index)), segments_(std::move(segments)) {}

Result<std::unique_ptr<CacheMemory>> CacheMemory::create(const CacheOptions& options) {
    const std::uint64_t count = (options.pool_bytes + options.segment_bytes - 1) / options.segment_bytes;
    if (Status status = check_total(options, count * options.segment_bytes); !status.ok()) {
        return status;
    }
    auto lock_file = make_lock_file();
    if (!lock_file.ok()) {
        return lock_file.fault();
    }
    auto lock = FileLock::take(lock_file.value());
    if (!lock.ok()) {
        return lock.fault();
    }
    const auto seed = random_number();
    if (!seed.ok()) {
        return seed.fault();
    }
    auto index = IndexFile::create({.entry_limit = options.entry_limit,
                                    .segment_bytes = options.segment_bytes,
                                    .extent_bytes = options.extent_bytes},
                                   seed.value());
    if (!index.ok()) {
        return index.fault();
    }
    std::vector<Segment> segments;
    for (std::uint64_t i = 0; i < count; ++i) {
        auto segment = Segment::create(
            {.size_bytes = options.segment_bytes, .huge_pages = options.huge_pages, .placement = options.placement});
        if (!segment.ok()) {
            return segment.fault();
        }
        segments.push_back(std::move(segment.value()));
    }
    const auto mark = mark_segments(segments);
    if (!mark.ok()) {
        return mark.fault();
    }
    const auto lock_mark = mark_file(lock.value().name());
    if (!lock_mark.ok()) {
        return lock_mark.fault();
    }
    IndexHeader& header = *index.value().view().header;
    header.segments_mark = mark.value();
    header.lock_mark = lock_mark.value();
    std::ranges::copy(options.owner.domain, header.domain.begin());
    header.segment_count.store(static_cast<std::uint32_t>(count));
    header.ready_bytes.store(options.is_sparse ? count * options.segment_bytes : 0);
    return std::unique_ptr<CacheMemory>(
        new CacheMemory(std::move(lock.value()), std::move(index.value()), std::move(segments)));
}

Result<std::unique_ptr<CacheMemory>> CacheMemory::adopt(CacheFiles files, const CacheOptions& options) {
    auto lock = FileLock::adopt(files.lock);
    if (!lock.ok()) {
        return lock.fault();
    }
    auto index = IndexFile::adopt(std::move(files.index));
    if (!index.ok()) {
        return index.fault();
    }
    const IndexHeader& header = *index.value().view().header;
    const auto lock_mark = mark_file(lock.value().name());
    if (!lock_mark.ok() || lock_mark.value() != header.lock_mark) {
        return Status(Code::invalid, "the lock is not the index's own");
    }
    if (Status status = check_former_owner(header, options); !status.ok()) {
        return status;
    }
    if (header.segment_count.load() != files.segments.size()) {
        return Status(Code::invalid, "the index is of " + std::to_string(header.segment_count.load()) +
                                         " segments, not of " + std::to_string(files.segments.size()));
    }
    if (const std::uint64_t ready = header.ready_bytes.load(); header.extent_bytes == 0 ||
                                                               ready % header.extent_bytes != 0 ||
                                                               ready > files.segments.size() * header.segment_bytes) {
        return Status(Code::invalid, "the index says that " + std::to_string(ready) + " bytes are ready");
    }
    std::vector<Segment> segments;
    for (FileDescriptor& file : files.segments) {
        auto segment = Segment::adopt(
            std::move(file), {.size_bytes = header.segment_bytes, .huge_pages = options.huge_pages, .is_own = true});
        if (!segment.ok()) {
            return segment.fault();
        }
        segments.push_back(std::move(segment.value()));
    }
    const auto mark = mark_segments(segments);
    if (!mark.ok()) {
        return mark.fault();
    }
    if (mark.value() != header.segments_mark) {
        return Status(Code::invalid, "these segments are not the index's own, or not in their order");
    }
    return std::unique_ptr<CacheMemory>(
        new CacheMemory(std::move(lock.value()), std::move(index.value()), std::move(segments)));
}

FileNumbers CacheMemory::files() const {
    FileNumbers numbers{.lock = lock_.name(), .index = index_.read_only_file(), .segments = {}};
    for (const Segment& segment : segments_) {
        numbers.segments.push_back(segment.file());
    }
    return numbers;
}

Status CacheMemory::note_boot(std::uint64_t boot_id) {
    if (boot_id == 0) {
        const auto drawn = random_number();
        if (!drawn.ok()) {
            return drawn.fault();
        }
        boot_id = drawn.value();
    }
    // A process that ended while it gave memory back is no reason to go on with that.
    index_.view().header->leaving_from.store(0);
    index_.view().header->boot_id.store(boot_id);
    return {};
}

void CacheMemory::note_user(std::uint32_t uid) {
    const std::lock_guard lock(noting_);
    IndexHeader& header = *index_.view().header;
    const std::uint32_t count = header.user_count.load();
    const auto known = std::span(header.users).first(std::min(count, kUserLimit));
    if (std::ranges::find(known, uid, [](const auto& user) { return user.load(); }) != known.end()) {
        return;
    }
    if (count < kUserLimit) {
        header.users[count].store(uid);
    }
    header.user_count.store(std::min(count, kUserLimit) + 1);
}

std::span<std::byte> CacheMemory::bytes_at(std::uint64_t address, std::uint64_t size) {
    const std::uint64_t segment = address / header().segment_bytes;
    const std::uint64_t offset = address % header().segment_bytes;
    if (segment >= segments_.size() || size > header().segment_bytes - offset) {
        return {};
    }
    return segments_[segment].writable_bytes().subspan(offset, size);
}

}  // namespace kvo
