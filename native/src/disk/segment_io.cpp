#include "disk/segment_io.hpp"

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvo {

std::optional<FoundSegment> SegmentIo::find(std::uint32_t number, int& error) {
    const int file = files_[number].file.number();
    const ReadExactly read_part = [&](std::uint64_t offset, std::span<std::byte> target) {
        const int now = error == ETIMEDOUT ? error : read(file, offset, target);
        error = now == ETIMEDOUT || error == 0 ? now : error;
        return now == 0;
    };
    auto found = find_segment(read_part, files_.store(), terms_.segment_bytes, terms_.record_limit_bytes);
    if (found) {
        found->is_whole = error == 0;
    }
    return found;
}

std::optional<std::vector<FooterEntry>> SegmentIo::find_entries(std::uint32_t number) {
    const SegmentFile& segment = files_[number];
    const auto read_part = [this, file = segment.file.number()](std::uint64_t offset, std::span<std::byte> target) {
        return read(file, offset, target) == 0;
    };
    return find_footer(read_part, segment.life, terms_.segment_bytes);
}

bool SegmentIo::write_footer(std::uint32_t number, const FoundSegment& found) {
    const std::uint64_t bytes = footer_bytes(found.entries.size());
    Result<AlignedMemory> made = AlignedMemory::create(bytes);
    const FooterEntry& last = found.entries.back();
    if (!made.ok() || last.offset + record_footprint(stored_length(last)) > terms_.segment_bytes - bytes) {
        return false;
    }
    auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    std::memcpy(memory->start(), found.entries.data(), found.entries.size() * sizeof(FooterEntry));
    const FooterTail tail = make_footer_tail(found.life, found.entries.size(), terms_.segment_bytes,
                                             memory->span().first(bytes - sizeof(FooterTail)));
    std::memcpy(memory->start() + bytes - sizeof tail, &tail, sizeof tail);
    const int file = files_[number].file.number();
    files_.spend(bytes);
    return run(IoKind::write, file, terms_.segment_bytes - bytes, memory) == 0 &&
           run(IoKind::sync, file, 0, memory) == 0;
}

// An errno, 0 if all is there.
int SegmentIo::read(int file, std::uint64_t offset, std::span<std::byte> target) {
    Result<AlignedMemory> made = AlignedMemory::create(target.size());
    if (!made.ok()) {
        return ENOMEM;
    }
    const auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    if (const int error = run(IoKind::read, file, offset, memory); error != 0) {
        return error;
    }
    counts_.read_bytes += target.size();
    std::memcpy(target.data(), memory->start(), target.size());
    return 0;
}

// An errno. The memory is the kernel's for as long as it may touch it.
int SegmentIo::run(IoKind kind, int file, std::uint64_t offset, const std::shared_ptr<AlignedMemory>& memory) {
    auto outcome = std::make_shared<std::optional<int>>();
    runner_.run(
        {kind, file, offset, memory->start(), static_cast<std::uint32_t>(memory->bytes()), 0},
        terms_.now() + terms_.io_timeout, [outcome](int error) { *outcome = error; }, [memory] {});
    for (runner_.poll(terms_.now()); !outcome->has_value(); runner_.poll(terms_.now())) {
        wait_readable(runner_.queue().file(), 10);
    }
    counts_.io_errors += **outcome == 0 ? 0 : 1;
    return **outcome;
}

}  // namespace kvo
